"""`Plans`: the checkpoints that open sequences will make. Each is planned by one sequence, so none is made twice.

A request with the same prefix may wait for a planned checkpoint.
"""

from jaxkv.cache.kept_states.checkpoints import CheckpointKey
from jaxkv.cache.page_allocator import PageAllocator


class Plans:
    """The checkpoints that open sequences have yet to make.

    Args:
        allocator: the progress and the pending checkpoints of the sequences.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._planned: dict[bytes, tuple[int, int]] = {}  # Digest -> (sequence, length in tokens).

    def __len__(self) -> int:
        return len(self._planned)

    def add(self, seq: int, key: CheckpointKey) -> None:
        """Plans a checkpoint by a sequence, unless another sequence plans it already."""
        self._planned.setdefault(key.digest, (seq, key.length))

    def claim(self, seq: int, key: CheckpointKey) -> None:
        """Records that a sequence has taken states for a checkpoint that it `may_make`, planned by it or not."""
        self._planned[key.digest] = seq, key.length

    def remove(self, key: CheckpointKey) -> None:
        """Removes a plan that was carried out or dropped."""
        self._planned.pop(key.digest, None)

    def may_make(self, seq: int, key: CheckpointKey) -> bool:
        """Whether this sequence plans the checkpoint, or no sequence does."""
        plan = seq, key.length
        return self._planned.get(key.digest, plan) == plan

    def between(self, low: int, high: int) -> list[tuple[bytes, int]]:
        """Returns the (digest, length) of the planned checkpoints with a length in (`low`, `high`]."""
        return [
            (digest, length)
            for digest, (_, length) in self._planned.items()
            if low < length <= high
        ]

    def remove_idle(self) -> None:
        """Removes the plans of sequences that have ended, or have passed the length without a pending checkpoint."""
        for digest, (seq, length) in list(self._planned.items()):
            if self._allocator.is_open(seq):
                held = self._allocator.held(seq)
                if held.computed < length or length in held.pending_checkpoints:
                    continue
            del self._planned[digest]

    def num_claimed(self) -> int:
        """Returns the number of plans whose sequence holds states for it; call `remove_idle` first."""
        held = self._allocator.held_by([seq for seq, _ in self._planned.values()])
        lengths = (length for _, length in self._planned.values())
        return sum(
            length in one.pending_checkpoints for one, length in zip(held, lengths, strict=True)
        )

    def clear(self) -> None:
        """Removes all plans."""
        self._planned.clear()

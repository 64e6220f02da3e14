"""Which sequence is about to leave which checkpoint: none is made twice, and a text that begins alike may wait for it.

Knows names and sequences, never which states a checkpoint has.
"""

from jaxkv.cache.kept_states.checkpoints import CheckpointKey
from jaxkv.cache.page_allocator import PageAllocator


class Plans:
    """The checkpoints that open sequences mean to leave on their way.

    Args:
        allocator: knows how far sequences are, and what their steps keep.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._meant: dict[bytes, tuple[int, int]] = {}  # Name -> sequence and tokens.

    def __len__(self) -> int:
        return len(self._meant)

    def mean(self, seq: int, key: CheckpointKey) -> None:
        """Notes that a sequence is to leave a checkpoint, unless another one is."""
        self._meant.setdefault(key.digest, (seq, key.length))

    def begin(self, seq: int, key: CheckpointKey) -> None:
        """Notes that a sequence has states for a checkpoint that it may make."""
        self._meant[key.digest] = seq, key.length

    def end(self, key: CheckpointKey) -> None:
        """Forgets what has been made, or will not be."""
        self._meant.pop(key.digest, None)

    def may_make(self, seq: int, key: CheckpointKey) -> bool:
        """Whether no other sequence is to leave a checkpoint."""
        mine = seq, key.length
        return self._meant.get(key.digest, mine) == mine

    def between(self, low: int, high: int) -> list[tuple[bytes, int]]:
        """Returns the names and lengths of those to come after more than `low`, up to `high` tokens."""
        return [(name, at) for name, (_, at) in self._meant.items() if low < at <= high]

    def forget_idle(self) -> None:
        """Forgets plans of sequences that have gone, or have passed the place and left nothing."""
        for digest, (seq, length) in list(self._meant.items()):
            if self._allocator.is_open(seq):
                held = self._allocator.held(seq)
                if held.computed < length or length in held.snapshots:
                    continue
            del self._meant[digest]

    def num_begun(self) -> int:
        """Returns for how many a sequence holds states; `forget_idle` first."""
        held = self._allocator.held_by([seq for seq, _ in self._meant.values()])
        lengths = (length for _, length in self._meant.values())
        return sum(length in one.snapshots for one, length in zip(held, lengths, strict=True))

    def clear(self) -> None:
        """Forgets all."""
        self._meant.clear()

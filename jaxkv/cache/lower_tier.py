"""What the prefix index asks of a tier below it, such as host memory, that keeps what the index evicts."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from jaxkv.cache.kept_pages.keys import PageKey, PageKeys
from jaxkv.cache.kept_pages.tree import Node
from jaxkv.cache.kept_states.checkpoints import Checkpoint


@runtime_checkable
class LowerTier(Protocol):
    """Keeps pages and checkpoints by name; `jaxkv.offload.tier.HostTier` is one."""

    def find(self, group: str, key: PageKey) -> Node | None:
        """Returns the page of this name that holds these very tokens."""
        ...

    def offer_page(self, group: str, node: Node) -> bool:
        """Takes over a page that is being evicted; returns whether there was room."""
        ...

    def offer_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Takes over a checkpoint that is being evicted; returns whether there was room."""
        ...

    def forget(self, places: Iterable[tuple[str, bytes]]) -> None:
        """Drops the pages and checkpoints of these groups and digests."""
        ...

    def forget_made(self, seq: int) -> None:
        """Drops the checkpoints that a sequence made."""
        ...

    def lose_device(self) -> None:
        """Drops what has not left the device yet."""
        ...

    def clear(self) -> None:
        """Drops everything."""
        ...

    def check(self) -> None:
        """Raises `ValueError` if its books contradict themselves."""
        ...


@runtime_checkable
class SwapIns(Protocol):
    """Brings back what the lower tier keeps; `jaxkv.offload.swap_in.SwapIns` does."""

    @property
    def tier(self) -> LowerTier:
        """Where it comes from."""
        ...

    def find(
        self, tokens: Sequence[int], keys: PageKeys, limit: int
    ) -> tuple[int, Checkpoint | None]:
        """Returns the longest beginning up to `limit` tokens that both tiers have together, and its checkpoint."""
        ...

    def drop_all(self) -> None:
        """Gives up every swap-in that has not ended."""
        ...

"""The interfaces between the prefix index and a lower tier, such as host memory, that stores evicted pages."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from jaxkv.cache.kept_pages.keys import PageKey, PageKeys
from jaxkv.cache.kept_pages.tree import Node
from jaxkv.cache.kept_states.checkpoints import Checkpoint


@runtime_checkable
class LowerTier(Protocol):
    """Stores pages and checkpoints by key; `jaxkv.offload.tier.HostTier` implements it."""

    def find(self, group: str, key: PageKey) -> Node | None:
        """Returns the page with this key, whose tokens are compared too; `None` if there is none."""
        ...

    def offer_page(self, group: str, node: Node) -> bool:
        """Stores a page that is being evicted; returns whether there was room."""
        ...

    def offer_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Stores a checkpoint that is being evicted; returns whether there was room."""
        ...

    def remove(self, keys: Iterable[tuple[str, bytes]]) -> None:
        """Drops the pages and checkpoints with these (group name, digest) pairs; the group of a checkpoint is ""."""
        ...

    def remove_unreachable(self, on_device: Callable[[tuple[str, bytes]], bool]) -> None:
        """Drops what needs an entry that neither tier has; `on_device` says whether the device has the one of a key."""
        ...

    def remove_made(self, seq: int) -> None:
        """Drops the checkpoints that sequence `seq` made."""
        ...

    def lose_device(self) -> None:
        """Drops entries that have not been read from the device yet, because its cache is lost."""
        ...

    def clear(self) -> None:
        """Drops all pages and checkpoints."""
        ...

    def check(self) -> None:
        """Raises `ValueError` if its records contradict each other."""
        ...


@runtime_checkable
class SwapIns(Protocol):
    """Copies pages and checkpoints from a lower tier to the device; implemented by `offload.swap_in.SwapIns`."""

    @property
    def tier(self) -> LowerTier:
        """The tier to copy from."""
        ...

    def find_prefix(
        self, tokens: Sequence[int], keys: PageKeys, limit: int
    ) -> tuple[int, Checkpoint | None]:
        """Returns the longest prefix, up to `limit` tokens, that both tiers hold together, and its checkpoint."""
        ...

    def release_all(self) -> None:
        """Cancels every unfinished swap-in."""
        ...

"""The host tier of one engine: books, memory, transfers and those who wait, put together and taken down."""

import logging

import jax

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.host_prefetch import HostPrefetch
from jaxkv.models.protocol import Model
from jaxkv.offload.entries import HostStats
from jaxkv.offload.memory import HostMemory
from jaxkv.offload.swap_in import attach_host
from jaxkv.offload.tier import HostTier
from jaxkv.offload.transfers import HostTransfers
from jaxkv.runner.model_runner import ModelRunner

_LOG = logging.getLogger(__name__)


class HostCache:
    """What an engine has of the host's memory.

    Args:
        runner: has the device's cache.
        prefix: the index whose evicted pages and checkpoints go to the host.
        num_bytes: memory of the host to take.

    Attributes:
        prefetch: brings them back.
        transfers: moves the bytes.
        disabled: why it was taken down; empty while it works.
    """

    def __init__(self, runner: ModelRunner, prefix: PrefixIndex, num_bytes: int) -> None:
        [device] = jax.tree.leaves(runner.cache)[0].devices()
        self._prefix = prefix
        swap_ins = attach_host(prefix, num_bytes)
        self.tier: HostTier = swap_ins.tier
        self.transfers = HostTransfers(runner, self.tier, HostMemory(device))
        self.prefetch = HostPrefetch(prefix, swap_ins, self.transfers)
        self.disabled = ""
        self._end_observing = runner.owner.before_donation(self._before_donation)

    @property
    def kind(self) -> str:
        """What the memory is: "pinned_host" or "pageable"; after "disabled: ", why there is none any more."""
        return f"disabled: {self.disabled}" if self.disabled else self.transfers.memory.kind

    @property
    def stats(self) -> HostStats:
        """What lies there, and what has moved."""
        return self.tier.stats

    def advance(self, *, wait: bool = False) -> None:
        """Goes on with what comes back; see `HostPrefetch.advance`."""
        self.prefetch.advance(wait=wait)

    def lose_device(self) -> None:
        """Forgets what the index had in a cache that is lost; what has reached the host will be found again."""
        self.prefetch.give_way()
        self.transfers.lose_device()
        self._prefix.lose_device()

    def close(self, reason: str = "closed") -> tuple[Exception, ...]:
        """Frees the host's memory, and lets evicted pages be lost from now on; a second time does nothing.

        Args:
            reason: for `kind`.

        Returns:
            What could not be freed.
        """
        self.prefetch.give_way()
        self._prefix.detach_lower_tier()
        self._end_observing()
        self.disabled = self.disabled or reason
        return self.transfers.close()

    def _before_donation(self) -> None:
        self.transfers.flush()
        hopeless = self.transfers.why_hopeless()
        if hopeless:
            _LOG.error("prefixes go to the host no more: %s", hopeless)
            self.close(hopeless)


def why_no_host(model: Model, prefix: PrefixIndex | None, num_bytes: int) -> str:
    """Returns "off" if no bytes were given, "disabled: " and why if they would be of no use, and nothing otherwise."""
    if not num_bytes:
        return "off"
    why_never = "the prefix cache is off" if prefix is None else prefix.why_never
    if model.whole_prompts:
        why_never = "prompts of this model share nothing"
    return f"disabled: {why_never}" if why_never else ""


def open_host(runner: ModelRunner, prefix: PrefixIndex | None, num_bytes: int) -> HostCache | None:
    """Returns the host tier of an engine; `None` if it has no bytes, or nothing could be found again there."""
    why_not = why_no_host(runner.model, prefix, num_bytes)
    if prefix is not None and not why_not:
        return HostCache(runner, prefix, num_bytes)
    if num_bytes:
        _LOG.warning("nothing will be kept on the host, %s", why_not)
    return None

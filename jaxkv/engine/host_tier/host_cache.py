"""The host tier of one engine: its construction from index, memory, transfers and prefetch, and its shutdown."""

import logging
import threading

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.host_tier.host_prefetch import HostPrefetch
from jaxkv.models.protocol import Model
from jaxkv.offload.entries import HostStats
from jaxkv.offload.memory import HostMemory
from jaxkv.offload.swap_in import attach_host
from jaxkv.offload.tier import HostTier
from jaxkv.offload.transfers import HostTransfers
from jaxkv.runner.model_runner import ModelRunner

_LOG = logging.getLogger(__name__)
_WITH_POOL = ("gpu",)
"""Platforms on which JAX takes pinned memory from a pool that grows."""


class HostCache:
    """The host tier: keeps evicted prefixes in host memory and swaps them in again.

    Args:
        runner: owns the device's cache.
        prefix: the index whose evicted pages and checkpoints move to the host.
        num_bytes: host memory to use, in bytes.

    Attributes:
        tier: records of the entries on the host.
        prefetch: swap-ins for waiting requests.
        transfers: moves the bytes.
        disabled: why the tier was shut down; empty while it works.
    """

    def __init__(self, runner: ModelRunner, prefix: PrefixIndex, num_bytes: int) -> None:
        devices = runner.cache.arrays[0].sharding.device_set
        device = min(devices, key=lambda one: one.id)
        self._prefix = prefix
        # The tier counts the bytes of one device's part; each device has at most as many.
        swap_ins = attach_host(prefix, num_bytes // len(devices))
        self.tier: HostTier = swap_ins.tier
        memory = HostMemory(device)
        self._ended = threading.Event()
        if device.platform in _WITH_POOL:
            # It takes seconds, in which programs are compiled. A daemon that copies would abort a process that ends.
            given = num_bytes, self._ended
            threading.Thread(target=memory.reserve, args=given, name="jaxkv-pinned-memory").start()
        self.transfers = HostTransfers(runner, self.tier, memory)
        self.prefetch = HostPrefetch(prefix, swap_ins, self.transfers)
        self.disabled = ""
        self._end_observing = runner.owner.before_donation(self._before_donation)

    @property
    def kind(self) -> str:
        """Kind of host memory, "pinned_host" or "pageable"; "disabled: " and the reason after a shutdown."""
        return f"disabled: {self.disabled}" if self.disabled else self.transfers.memory.kind

    @property
    def stats(self) -> HostStats:
        """Entries on the host, and bytes moved."""
        return self.tier.stats

    def advance(self, *, wait: bool = False) -> None:
        """Advances the swap-ins; see `HostPrefetch.advance`."""
        self.prefetch.advance(wait=wait)

    def lose_device(self) -> None:
        """Removes what a lost cache held from the index; entries on the host stay and can be hit."""
        self.prefetch.cancel_all()
        self.transfers.lose_device()
        self._prefix.lose_device()

    def clear(self) -> None:
        """Removes all prefixes, on the device and on the host."""
        self.prefetch.cancel_all()
        self._prefix.clear()

    def close(self, reason: str = "closed") -> tuple[Exception, ...]:
        """Frees the host memory and detaches the tier from the index. A second call does nothing.

        Args:
            reason: shown by `kind`.

        Returns:
            The errors of buffers that could not be freed.
        """
        self._ended.set()
        self.prefetch.cancel_all()
        self._prefix.detach_lower_tier()
        self._end_observing()
        self.disabled = self.disabled or reason
        return self.transfers.close()

    def _before_donation(self) -> None:
        self.transfers.flush()
        hopeless = self.transfers.why_hopeless()
        if hopeless:
            _LOG.error("the host tier is shut down, evicted prefixes are lost: %s", hopeless)
            self.close(hopeless)


def why_no_host(model: Model, prefix: PrefixIndex | None, num_bytes: int) -> str:
    """Returns "off" if `num_bytes` is 0, "disabled: " and the reason if no prefix can be reused, and else ""."""
    if not num_bytes:
        return "off"
    why_never = "the prefix cache is off" if prefix is None else prefix.why_never
    if model.whole_prompts:
        why_never = "this model needs whole prompts, which share no prefix"
    return f"disabled: {why_never}" if why_never else ""


def open_host(runner: ModelRunner, prefix: PrefixIndex | None, num_bytes: int) -> HostCache | None:
    """Returns the host tier of an engine; `None` if it has no memory, or no prefix can be reused."""
    why_not = why_no_host(runner.model, prefix, num_bytes)
    if prefix is not None and not why_not:
        return HostCache(runner, prefix, num_bytes)
    if num_bytes:
        _LOG.warning("the host tier is off although host_bytes is set: %s", why_not)
    return None

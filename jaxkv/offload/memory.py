"""Arrays on the host's side: pinned where the device can reach them by itself, else NumPy's.

What is sent may still be on its way when the call returns. Knows nothing of pages. Whether its
memory is pinned is found out by a round trip on the device itself.
"""

import logging
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

_LOG = logging.getLogger(__name__)

PINNED, PAGEABLE = "pinned_host", "pageable"

Stored = tuple[jax.Array | np.ndarray, ...]
"""One page or state: arrays that are on the host, or will be."""


class HostMemory:
    """The host's memory beside one device.

    Args:
        device: whose arrays come and go.

    Attributes:
        kind: "pinned_host", or "pageable" where a copy needs the processor; that is said once in the log.
        reason: why it is not pinned; empty if it is.
    """

    def __init__(self, device: jax.Device) -> None:  # pyright: ignore[reportInvalidTypeForm]
        self._device = device
        self.reason = _why_not_pinned(device)
        self.kind = PAGEABLE if self.reason else PINNED
        if self.reason:
            _LOG.warning("prefixes on the host are copied through pageable memory: %s", self.reason)

    def send(self, units: Sequence[Stored]) -> list[Stored]:
        """Begins to copy device arrays to the host. `settle` what comes back before it is kept for long."""
        if self.kind == PINNED:
            # One call for all: a call costs as much as dozens of arrays.
            return jax.device_put(list(units), _place(self._device, PINNED))
        for array in jax.tree.leaves(units):
            array.copy_to_host_async()
        return list(units)

    def settle(self, units: Sequence[Stored]) -> list[Stored]:
        """Waits until arrays are on the host.

        Raises:
            JaxRuntimeError: the copy failed, or what was copied could not be computed.
        """
        if self.kind == PINNED:
            return jax.block_until_ready(list(units))
        # A copy of its own: NumPy's view would keep the device's memory.
        return [tuple(np.array(array, copy=True) for array in unit) for unit in units]

    def bring(self, units: Sequence[Stored]) -> list[Stored]:
        """Begins to copy arrays to the device, beside what it computes."""
        return jax.device_put(list(units), _place(self._device, "device"))


def is_ready(units: Sequence[Stored]) -> bool:
    """Whether all arrays have come, or failed to."""
    return all(
        isinstance(array, np.ndarray) or array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
        for unit in units
        for array in unit
    )


def _place(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    kind: str,
) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind=kind)


def _why_not_pinned(device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """Tries a round trip; returns what is wrong with it, or nothing."""
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if PINNED not in kinds or "device" not in kinds:
        return f"{device} offers the memories {', '.join(kinds) or 'none'}, and not {PINNED}"
    wanted = np.arange(64, dtype=np.uint8)
    try:
        there = jax.device_put(jax.device_put(wanted, device), _place(device, PINNED))
        back = np.array(jax.device_put(there, _place(device, "device")))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"a copy to {PINNED} and back failed on {device}: {error}"
    return "" if np.array_equal(back, wanted) else f"{device} returned other bytes from {PINNED}"

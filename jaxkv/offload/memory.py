"""Host memory beside the devices: pinned if they support it, otherwise NumPy arrays.

Copies are asynchronous. Support for pinned memory is tested by a round trip on the device.
"""

import logging
import threading
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

_LOG = logging.getLogger(__name__)

PINNED, PAGEABLE = "pinned_host", "pageable"

_RESERVED = 2**30
"""Bytes that are reserved at a time."""

HostArrays = tuple[jax.Array | np.ndarray, ...]
"""One page or state: its arrays on the host, whose copies may be in flight."""


class HostMemory:
    """Copies arrays between the devices and the host. Of a divided array each device copies its own part.

    Args:
        device: one of the devices, on which copies are tried.

    Attributes:
        kind: "pinned_host", or "pageable" where copies use the CPU, which is logged once.
        reason: why the memory is not pinned; empty if it is.
    """

    def __init__(self, device: jax.Device) -> None:  # pyright: ignore[reportInvalidTypeForm]
        self._device = device
        self.reason = _why_pageable(device)
        self.kind = PAGEABLE if self.reason else PINNED
        if self.reason:
            _LOG.warning("prefixes on the host are copied through pageable memory: %s", self.reason)

    def reserve(self, num_bytes: int, ended: threading.Event) -> None:
        """Lets JAX's pool of pinned memory grow by this much, and returns when it has; a failure is logged.

        The pool grows when a copy finds no room, to twice its size, and keeps what is freed. On an H200 each GiB takes
        half a second, during which the copy waits. Pageable memory has no pool.

        Args:
            num_bytes: bytes to reserve.
            ended: ends it early if set, as the end of the main thread does.
        """
        # Zeros that are only read take no memory themselves.
        held, place, piece = [], _place(self._device, PINNED), np.zeros(_RESERVED, np.uint8)
        left = num_bytes if self.kind == PINNED else 0
        while left > 0 and not ended.is_set() and threading.main_thread().is_alive():
            try:
                held.append(jax.block_until_ready(jax.device_put(piece[:left], place)))
            except (RuntimeError, MemoryError) as error:
                _LOG.warning(
                    "of %d bytes of pinned memory %d are not reserved, so copies will wait for them: %s",
                    num_bytes,
                    left,
                    error,
                )
                return
            left -= piece.nbytes

    def copy_to_host(self, units: Sequence[HostArrays]) -> list[HostArrays]:
        """Starts copies of device arrays to the host; call `wait_for_copies` on the result before keeping it."""
        if self.kind == PINNED:
            # One call for all units: a call costs as much as dozens of arrays.
            kept = list(units)
            return jax.device_put(kept, jax.tree.map(_pinned, kept))
        for array in jax.tree.leaves(units):
            array.copy_to_host_async()
        return list(units)

    def wait_for_copies(self, units: Sequence[HostArrays]) -> list[HostArrays]:
        """Waits until the copies of `copy_to_host` are complete; returns arrays that do not refer to the device.

        Raises:
            JaxRuntimeError: a copy failed, or the computation of its source did.
        """
        if self.kind == PINNED:
            return jax.block_until_ready(list(units))
        # Copied, because NumPy's view would keep the device array alive.
        return [tuple(np.array(array, copy=True) for array in unit) for unit in units]

    def copy_to_device(
        self, units: Sequence[HostArrays], places: Sequence[Sharding]
    ) -> list[HostArrays]:
        """Starts copies of host arrays to the devices, concurrently with their computation.

        Args:
            units: pages or states of one group.
            places: where each array of a unit goes, see `unit_places`.
        """
        return jax.device_put(list(units), [tuple(places)] * len(units))


def is_ready(units: Sequence[HostArrays]) -> bool:
    """Whether all copies are complete or have failed."""
    return all(
        isinstance(array, np.ndarray) or array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
        for unit in units
        for array in unit
    )


def _pinned(array: jax.Array) -> Sharding:
    """Returns where an array is, in the host's memory."""
    return array.sharding.with_memory_kind(PINNED)


def _place(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    kind: str,
) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind=kind)


def _why_pageable(device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """Tests a round trip through pinned memory; returns the reason why it fails, or an empty string."""
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if PINNED not in kinds or "device" not in kinds:
        return f"{device} has the memory kinds {', '.join(kinds) or 'none'}, but not {PINNED}"
    wanted = np.arange(64, dtype=np.uint8)
    try:
        there = jax.device_put(jax.device_put(wanted, device), _place(device, PINNED))
        back = np.array(jax.device_put(there, _place(device, "device")))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return f"a copy to {PINNED} and back failed on {device}: {error}"
    return "" if np.array_equal(back, wanted) else f"{device} returned wrong bytes from {PINNED}"

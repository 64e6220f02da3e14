"""Copies pages and states between the cache and the host.

Swap-out: a program reads evicted pages and states into arrays of their own, before any program that could overwrite
them is dispatched. The arrays are copied to the host concurrently with later steps. Swap-in: arrays are copied to the
device, and a program writes them to the cache once they have arrived, so that no step waits. If a transfer fails, only
its entries are lost. `HostTier` has the records of the entries.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import CacheLayout
from jaxkv.errors import STEP_FAILURES, CachePoisoned
from jaxkv.memory import is_out_of_memory
from jaxkv.offload.entries import Move
from jaxkv.offload.memory import HostArrays, HostMemory, is_ready
from jaxkv.offload.programs import BUCKETS, SwapSpec, bucket_of, pad_ids, unit_places
from jaxkv.offload.swap_in import SwapIn
from jaxkv.offload.tier import HostTier

_LOG = logging.getLogger(__name__)

STAGED_BYTES = 2**28
"""Most bytes of device memory for transfers in flight, per direction; a single page or state may exceed it."""

_RECORDED = 64
_MAX_FAILURES = 3


@runtime_checkable
class Device(Protocol):
    """Runs programs on a cache; `ModelRunner` implements it."""

    layout: CacheLayout
    owner: CacheOwner

    def run_read_only(self, spec: SwapSpec, *arrays: np.ndarray) -> Any:  # noqa: ANN401 - the program's own output
        """Dispatches a program that only reads the cache."""
        ...

    def update(self, spec: SwapSpec, *arguments: Any) -> Any:  # noqa: ANN401 - the program's own types
        """Dispatches a program that updates the cache."""
        ...


@dataclass(eq=False)
class Transfer:
    """A transfer of pages or states of one group.

    Attributes:
        out: True for a swap-out, False for a swap-in.
        moves: the pages or states.
        num_bytes: their bytes.
        arrays: the arrays of each move while the transfer is in flight.
        done: whether the transfer is complete.
        error: why it failed; `None` if it did not.

    Raises:
        ValueError: there are no moves, or moves of several groups.
    """

    out: bool
    moves: tuple[Move, ...]
    num_bytes: int
    arrays: list[HostArrays] = field(default_factory=list)
    done: bool = False
    error: Exception | None = None

    def __post_init__(self) -> None:
        """Checks that all moves are of one group."""
        if len({move.group for move in self.moves}) != 1:
            raise ValueError(
                f"a transfer needs at least one page or state, all of one group; got {list(self.moves)}"
            )


@dataclass(eq=False)
class StagedSwapIn:
    """The transfers of one swap-in: those staged on the device, and those that wait for room."""

    swap_in: SwapIn
    waiting: deque[tuple[Move, ...]]
    staged: deque[Transfer] = field(default_factory=deque)


class HostTransfers:
    """The transfers of one host tier.

    Args:
        device: runs the programs on the cache.
        tier: the entries on the host.
        memory: copies arrays between device and host.

    Attributes:
        transfers: the latest transfers, complete or not.
    """

    def __init__(self, device: Device, tier: HostTier, memory: HostMemory) -> None:
        self.memory = memory
        self.transfers: deque[Transfer] = deque(maxlen=_RECORDED)
        self._device = device
        self._tier = tier
        cache = device.owner.handle().cache
        self._places = {group.name: unit_places(group, cache) for group in device.layout.groups}
        self._stored: dict[int, HostArrays] = {}
        self._sending: deque[Transfer] = deque()
        self._failures_in_row = 0
        # The tier's limit before failed transfers lowered it; `None` if a transfer has succeeded since.
        self._limit: int | None = None

    def flush(self) -> None:
        """Starts the swap-outs of evicted pages and states; call it before each program that updates the cache."""
        for handle in self._tier.freed():
            self._stored.pop(handle, None)
        for moves in _batches(self._tier.departures(), self._tier):
            self._send(moves)
        self._finish_ready()

    def read(self, group: str, handles: Sequence[int]) -> list[tuple[np.ndarray, ...]]:
        """Returns copies of a group's pages or states on the host; call `flush` before taking handles from the tier.

        Raises:
            JaxRuntimeError: the swap-out of one of them failed.
        """
        # Through the device, because `HostMemory` has tested only this way out of pinned memory.
        stored = [self._stored[handle] for handle in handles]
        found = self.memory.copy_to_device(stored, self._places[group])
        return [tuple(np.asarray(array) for array in unit) for unit in found]

    def start(self, swap_in: SwapIn) -> StagedSwapIn:
        """Starts the transfers of a swap-in; see `advance`."""
        self.flush()
        inbound = StagedSwapIn(swap_in, deque(_batches(swap_in.moves, self._tier)))
        self._stage(inbound)
        return inbound

    def advance(self, inbound: StagedSwapIn, *, wait: bool = False) -> bool | None:
        """Writes units that have arrived to the cache, and starts further transfers.

        Args:
            inbound: a swap-in from `start`.
            wait: whether to wait for the next transfer.

        Returns:
            Whether all units are written; `None` if a transfer failed, so that the swap-in must be dropped.

        Raises:
            CachePoisoned: a write failed and lost the cache.
        """
        while inbound.staged:
            transfer = inbound.staged[0]
            if not wait and not is_ready(transfer.arrays):
                return False
            wait = False
            if not self._write(transfer):
                inbound.staged.clear()
                return None
            inbound.staged.popleft()
            self._stage(inbound)
            if transfer.error is not None or any(one.error for one in inbound.staged):
                return None
        return not inbound.waiting

    def why_hopeless(self) -> str:
        """Returns the reason to shut the host tier down; empty if there is none."""
        if self._failures_in_row < _MAX_FAILURES:
            return ""
        errors = [transfer.error for transfer in self.transfers if transfer.error is not None]
        return f"{self._failures_in_row} transfers in a row failed, the last with: {errors[-1]}"

    def lose_device(self) -> None:
        """Finishes the swap-outs of a lost cache, and resets the counts of failures, which it caused."""
        while self._sending:
            self._finish(self._sending.popleft())
        self._failures_in_row = 0
        # Out-of-memory errors came from the step that lost the cache, not from the host: the tier gets its limit back.
        if self._limit is not None:
            self._tier.limit, self._limit = self._limit, None

    def close(self) -> tuple[Exception, ...]:
        """Frees all memory on the host; a second call does nothing.

        Returns:
            The errors of arrays that could not be freed.
        """
        failures: list[Exception] = []
        self._tier.clear()
        self._tier.departures()
        self._tier.freed()
        self._sending.clear()
        for stored in self._stored.values():
            for array in stored:
                try:
                    if isinstance(array, jax.Array) and not array.is_deleted():
                        array.delete()
                except STEP_FAILURES as error:
                    failures.append(error)
        self._stored.clear()
        self.transfers.clear()
        if failures:
            _LOG.warning("%d arrays on the host could not be freed: %r", len(failures), failures[0])
        return tuple(failures)

    def _send(self, moves: tuple[Move, ...]) -> None:
        """Reads pages or states out of the cache, and starts their copies to the host."""
        transfer = self._new(moves, out=True)
        while self._sending and self._staged(self._sending) + transfer.num_bytes > STAGED_BYTES:
            self._finish(self._sending.popleft())
        try:
            units = self._device.run_read_only(*self._call(moves, out=True))
            transfer.arrays = self.memory.copy_to_host(units[: len(moves)])
        except STEP_FAILURES as error:
            self._fail(transfer, error)
            return
        for move, stored in zip(moves, transfer.arrays, strict=True):
            self._stored[move.handle] = stored
        self._sending.append(transfer)

    def _finish_ready(self) -> None:
        """Finishes the swap-outs whose copies are complete, in order."""
        while self._sending and is_ready(self._sending[0].arrays):
            self._finish(self._sending.popleft())

    def _finish(self, transfer: Transfer) -> None:
        try:
            copied = self.memory.wait_for_copies(transfer.arrays)
        except STEP_FAILURES as error:
            self._fail(transfer, error)
            return
        for move, stored in zip(transfer.moves, copied, strict=True):
            if move.handle in self._stored:
                self._stored[move.handle] = stored
        self._succeed(transfer)

    def _stage(self, inbound: StagedSwapIn) -> None:
        """Starts copies to the device, up to `STAGED_BYTES`."""
        while inbound.waiting:
            transfer = self._new(inbound.waiting[0], out=False)
            if inbound.staged and (
                self._staged(inbound.staged) + transfer.num_bytes > STAGED_BYTES
            ):
                self.transfers.pop()
                return
            inbound.waiting.popleft()
            inbound.staged.append(transfer)
            try:
                stored = [self._stored[move.handle] for move in transfer.moves]
                places = self._places[transfer.moves[0].group]
                transfer.arrays = self.memory.copy_to_device(stored, places)
            except STEP_FAILURES as error:
                self._fail(transfer, error)
                return

    def _write(self, transfer: Transfer) -> bool:
        """Writes a staged transfer to the cache; returns whether the write was dispatched.

        It waits for the copy first, because a failed copy inside the program would lose the cache.
        """
        if transfer.error is not None:
            return False
        try:
            units = jax.block_until_ready(transfer.arrays)
            spec, ids = self._call(transfer.moves, out=False)
            padded = (*units, *units[-1:] * (spec.units - len(units)))
            self._device.update(spec, ids, padded)
        except CachePoisoned as error:
            transfer.error = error
            raise
        except STEP_FAILURES as error:
            self._fail(transfer, error)
            return False
        self._succeed(transfer)
        return True

    def _call(self, moves: Sequence[Move], *, out: bool) -> tuple[SwapSpec, np.ndarray]:
        layout, counts = self._device.layout, self._device.owner.counts
        group = layout.group(moves[0].group)
        size = bucket_of(len(moves))
        ids = pad_ids([move.unit for move in moves], size, counts[group.name])
        return SwapSpec(out, group.index, size), ids

    def _new(self, moves: tuple[Move, ...], *, out: bool) -> Transfer:
        size = sum(self._tier.bytes_of(move.group) for move in moves)
        transfer = Transfer(out, moves, size)
        self.transfers.append(transfer)
        return transfer

    def _staged(self, transfers: deque[Transfer]) -> int:
        return sum(transfer.num_bytes for transfer in transfers)

    def _succeed(self, transfer: Transfer) -> None:
        counts = self._tier.counts
        transfer.done, transfer.arrays, self._failures_in_row, self._limit = True, [], 0, None
        if transfer.out:
            counts.written += len(transfer.moves)
            counts.written_bytes += transfer.num_bytes
        else:
            counts.read += len(transfer.moves)
            counts.read_bytes += transfer.num_bytes

    def _fail(self, transfer: Transfer, error: Exception) -> None:
        """Records why a transfer failed, and drops its entries."""
        transfer.error, transfer.arrays = error, []
        self._tier.counts.failures += 1
        self._tier.discard(move.handle for move in transfer.moves)
        limit = self._tier.limit
        full = transfer.out and is_out_of_memory(error) and self._tier.stop_growing()
        if full and self._limit is None:
            self._limit = limit
        self._failures_in_row += not full
        way = "to" if transfer.out else "from"
        _LOG.warning("%d pages or states %s the host are lost: %r", len(transfer.moves), way, error)


def units_at_once(num_bytes: int) -> int:
    """Returns how many pages or states one run of a program moves, given the bytes of one."""
    return max(1, min(BUCKETS[-1], STAGED_BYTES // 2 // num_bytes))


def _batches(moves: Sequence[Move], tier: HostTier) -> Iterator[tuple[Move, ...]]:
    """Splits moves into launches: of one group, at most the largest bucket, and at most half of `STAGED_BYTES`."""
    for group, found in groupby(sorted(moves, key=lambda move: move.group), lambda one: one.group):
        of_group = list(found)
        size = units_at_once(tier.bytes_of(group))
        for first in range(0, len(of_group), size):
            yield tuple(of_group[first : first + size])

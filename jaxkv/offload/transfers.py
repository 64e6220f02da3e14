"""Moves pages and states between a cache and the host, and remembers what became of each transfer.

Reading a page out is dispatched before any program that could overwrite it, and the copy to the host goes on beside
what the device computes. What comes back is copied to the device first, and written into the cache once it is there,
so no step waits for it. A transfer that fails costs what it moved, and nothing else.
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
from jaxkv.offload.memory import HostMemory, Stored, is_ready
from jaxkv.offload.programs import BUCKETS, SwapSpec, bucket_of, pad_ids
from jaxkv.offload.swap_in import SwapIn
from jaxkv.offload.tier import HostTier

_LOG = logging.getLogger(__name__)

STAGED_BYTES = 2**28
"""Device memory for what is on its way, in each direction; one page or state may take more."""

_REMEMBERED = 64
_MOST_FAILURES = 3


@runtime_checkable
class Device(Protocol):
    """Has a cache and runs programs on it; an sequence_runner does."""

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
    """Some pages or states of one group on their way.

    Attributes:
        out: to the host, or else to the device.
        moves: which.
        num_bytes: of all of them.
        arrays: by move, where they come from until `done`, if they are read from the device.
        done: whether they have arrived.
        error: why they have not.
    """

    out: bool
    moves: tuple[Move, ...]
    num_bytes: int
    arrays: list[Stored] = field(default_factory=list)
    done: bool = False
    error: Exception | None = None

    def __post_init__(self) -> None:
        """Refuses to move nothing, and groups that are mixed."""
        if len({move.group for move in self.moves}) != 1:
            raise ValueError(
                f"a transfer moves pages or states of one group, at least one; got {list(self.moves)}"
            )


@dataclass(eq=False)
class Inbound:
    """A swap-in, of which some transfers are staged on the device and others have not begun."""

    swap_in: SwapIn
    waiting: deque[tuple[Move, ...]]
    staged: deque[Transfer] = field(default_factory=deque)


class HostTransfers:
    """What moves bytes for one tier.

    Args:
        device: has the cache, and runs the programs.
        tier: the books of the host.
        memory: where the bytes go.

    Attributes:
        transfers: the last ones, finished or not.
    """

    def __init__(self, device: Device, tier: HostTier, memory: HostMemory) -> None:
        self.memory = memory
        self.transfers: deque[Transfer] = deque(maxlen=_REMEMBERED)
        self._device = device
        self._tier = tier
        self._stored: dict[int, Stored] = {}
        self._sending: deque[Transfer] = deque()
        self._row = 0
        # What the tier might hold before transfers that failed since the last that came made it stop growing.
        self._limit: int | None = None

    def flush(self) -> None:
        """Begins to read out whatever has left the index; called before each program that updates the cache."""
        for handle in self._tier.freed():
            self._stored.pop(handle, None)
        for moves in _batches(self._tier.departures(), self._tier):
            self._send(moves)
        self._settle()

    def read(self, handles: Sequence[int]) -> list[tuple[np.ndarray, ...]]:
        """Returns copies of pages or states on the host; call `flush` before asking the tier what there is.

        Raises:
            JaxRuntimeError: one of them never arrived on the host.
        """
        # Through the device, the one way from pinned memory that `HostMemory` has tried.
        found = self.memory.bring([self._stored[handle] for handle in handles])
        return [tuple(np.asarray(array) for array in unit) for unit in found]

    def begin(self, swap_in: SwapIn) -> Inbound:
        """Begins to bring a prefix back; see `advance`."""
        self.flush()
        inbound = Inbound(swap_in, deque(_batches(swap_in.moves, self._tier)))
        self._stage(inbound)
        return inbound

    def advance(self, inbound: Inbound, *, wait: bool = False) -> bool | None:
        """Writes what has come into the cache, and begins to bring more.

        Args:
            inbound: a prefix on its way.
            wait: for the next part to come.

        Returns:
            Whether all is there; `None` if something failed, so that the swap-in must be dropped.

        Raises:
            CachePoisoned: writing cost the cache.
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
        """Returns why nothing should go to the host any more; empty while it should."""
        if self._row < _MOST_FAILURES:
            return ""
        errors = [transfer.error for transfer in self.transfers if transfer.error is not None]
        return f"{self._row} transfers in a row failed, the last with: {errors[-1]}"

    def lose_device(self) -> None:
        """Waits for everything that was read out of a cache that is lost now; its failures are no fault of the host."""
        while self._sending:
            self._finish(self._sending.popleft())
        self._row = 0
        # What ran out of memory was the step that cost the cache: whoever read its results has its error.
        if self._limit is not None:
            self._tier.limit, self._limit = self._limit, None

    def close(self) -> tuple[Exception, ...]:
        """Frees all memory on the host, whatever may fail; a second time does nothing.

        Returns:
            What failed.
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
        """Reads pages or states out of the cache, and begins to copy them to the host."""
        transfer = self._new(moves, out=True)
        while self._sending and self._staged(self._sending) + transfer.num_bytes > STAGED_BYTES:
            self._finish(self._sending.popleft())
        try:
            units = self._device.run_read_only(*self._call(moves, out=True))
            transfer.arrays = self.memory.send(units[: len(moves)])
        except STEP_FAILURES as error:
            self._fail(transfer, error)
            return
        for move, stored in zip(moves, transfer.arrays, strict=True):
            self._stored[move.handle] = stored
        self._sending.append(transfer)

    def _settle(self) -> None:
        """Ends the transfers to the host that have come."""
        while self._sending and is_ready(self._sending[0].arrays):
            self._finish(self._sending.popleft())

    def _finish(self, transfer: Transfer) -> None:
        try:
            settled = self.memory.settle(transfer.arrays)
        except STEP_FAILURES as error:
            self._fail(transfer, error)
            return
        for move, stored in zip(transfer.moves, settled, strict=True):
            if move.handle in self._stored:
                self._stored[move.handle] = stored
        self._succeed(transfer)

    def _stage(self, inbound: Inbound) -> None:
        """Begins to copy to the device as much as there is room for."""
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
                transfer.arrays = self.memory.bring(stored)
            except STEP_FAILURES as error:
                self._fail(transfer, error)
                return

    def _write(self, transfer: Transfer) -> bool:
        """Writes what was staged into its places; returns whether that could be dispatched.

        A copy that failed is heard of before it is written, where it would cost the cache.
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
        transfer.done, transfer.arrays, self._row, self._limit = True, [], 0, None
        if transfer.out:
            counts.written += len(transfer.moves)
            counts.written_bytes += transfer.num_bytes
        else:
            counts.read += len(transfer.moves)
            counts.read_bytes += transfer.num_bytes

    def _fail(self, transfer: Transfer, error: Exception) -> None:
        """Notes why a transfer failed, and forgets what it moved."""
        transfer.error, transfer.arrays = error, []
        self._tier.counts.failures += 1
        self._tier.discard(move.handle for move in transfer.moves)
        limit = self._tier.limit
        full = transfer.out and is_out_of_memory(error) and self._tier.stop_growing()
        if full and self._limit is None:
            self._limit = limit
        self._row += not full
        way = "to" if transfer.out else "from"
        _LOG.warning("%d pages or states %s the host are lost: %r", len(transfer.moves), way, error)


def units_at_once(num_bytes: int) -> int:
    """Returns how many pages or states of so many bytes one run of a program moves."""
    return max(1, min(BUCKETS[-1], STAGED_BYTES // 2 // num_bytes))


def _batches(moves: Sequence[Move], tier: HostTier) -> Iterator[tuple[Move, ...]]:
    """Cuts moves into runs of the programs: of one group, and of no more bytes than may be staged."""
    for group, found in groupby(sorted(moves, key=lambda move: move.group), lambda one: one.group):
        of_group = list(found)
        size = units_at_once(tier.bytes_of(group))
        for first in range(0, len(of_group), size):
            yield tuple(of_group[first : first + size])

"""`fill_leaves`: threads read leaves into a few page-locked buffers of the host while others are copied to the device.

Buffers are used again and again, because memory of its own for every leaf costs more in page faults than the reading.
A leaf larger than a buffer arrives in pieces of rows, which a program writes into it; rows and axes are put in the
leaf's order on the device. On a CPU each leaf is read into memory of its own, which JAX takes over.
"""

import logging
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Int, Shaped

from jaxkv.weights.stored_leaf import Arrangement, StoredLeaf, aligned

_LOG = logging.getLogger(__name__)

MOST_IN_FLIGHT = 2 * 2**30
"""Bytes of leaves with memory of their own that are read at once, unless a single leaf is larger."""

READERS = 8
BUFFERS = 12
"""Most buffers, more than readers, so that none waits while others are copied; together no more than the files."""
BUFFER_BYTES = 32 * 2**20
SMALL_BYTES = 2**20
"""A leaf up to this size has memory of its own, and waits for no buffer."""


Placed = Callable[[str, jax.Array], jax.Array]
"""Dotted path of a leaf, and the leaf on the first device -> the leaf to keep."""


@runtime_checkable
class Client(Protocol):
    """The methods of a device's client (`jax.Device.client`) for memory of the host."""

    def dma_map(self, address: int, size: int) -> None:
        """Locks pages, so that the device copies from them by itself."""
        ...

    def dma_unmap(self, address: int) -> None:
        """Unlocks them."""
        ...


class Buffer:
    """Bytes of the host that a device copies by itself (page-locked) if its driver supports it."""

    def __init__(self) -> None:
        self._memory = aligned((BUFFER_BYTES,), np.dtype(np.uint8), mmap.PAGESIZE)
        self._client: Client | None = None

    def lock(self, client: Client) -> str:
        """Locks the pages for copies to the client's devices; returns why it could not, empty if it could."""
        if self._client is None:
            try:
                client.dma_map(self._memory.ctypes.data, self._memory.nbytes)
            except jax.errors.JaxRuntimeError as error:
                return str(error)
            self._client = client
        return ""

    def unlock(self) -> None:
        """Unlocks the pages; no copy from them may be in flight."""
        if self._client is not None:
            self._client.dma_unmap(self._memory.ctypes.data)
            self._client = None

    def view(self, shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
        """Returns an array over the first bytes."""
        return self._memory[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


@dataclass(frozen=True)
class _Piece:
    """Rows of a leaf that are read into one buffer; or, without one, the whole leaf."""

    leaf: StoredLeaf
    buffer: Buffer | None
    first: int
    shape: tuple[int, ...]
    is_last: bool
    stored_bytes: int


def fill_leaves(
    leaves: Sequence[StoredLeaf],
    device: jax.Device | Sharding | None,  # pyright: ignore[reportInvalidTypeForm]
    advance: Callable[[int], object],
    placed: Placed | None = None,
) -> list[jax.Array]:
    """Returns all leaves on the device, in order; the first error ends the reading of all.

    Args:
        leaves: the leaves.
        device: device or sharding; `None` for JAX's default device.
        advance: is called with the bytes of the files that have arrived.
        placed: returns what becomes of a leaf that has arrived, such as its parts on several devices; `None` for the
            leaf itself.

    Raises:
        BadCheckpoint: a file has become shorter, or a number is not finite in the leaf's dtype.
    """
    with ThreadPoolExecutor(READERS, thread_name_prefix="jaxkv-load") as pool:
        buffers = sum(leaf.stored_bytes for leaf in leaves) // BUFFER_BYTES
        filling = _Filling(pool, device, advance, min(BUFFERS, max(1, buffers)), placed)
        try:
            for leaf in leaves:
                filling.start(leaf)
            return filling.finish()
        finally:
            try:
                # After an error, what waits is not read, and the files stay open until what is under way is.
                pool.shutdown(wait=True, cancel_futures=True)
            finally:
                filling.release()


class _Filling:
    """The leaves under way, in order: those that are read, then those that are copied to the device."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        device: jax.Device | Sharding | None,  # pyright: ignore[reportInvalidTypeForm]
        advance: Callable[[int], object],
        most_buffers: int,
        placed: Placed | None,
    ) -> None:
        self._pool = pool
        self._placed = placed
        self._most_buffers = most_buffers
        self._device = device
        self._advance = advance
        self._client = _staging_client(device)
        self._buffers: list[Buffer] = []
        self._free: list[Buffer] = []
        self._reading: deque[tuple[_Piece, Future[np.ndarray]]] = deque()
        self._copying: deque[tuple[Buffer, jax.Array]] = deque()
        self._held = 0
        self._filled: list[jax.Array] = []
        self._why_pageable = "" if self._client is None else _why_pageable(self._client)

    def start(self, leaf: StoredLeaf) -> None:
        """Starts reading a leaf, after earlier ones are copied to the device if the host holds too much."""
        if self._client is not None and _is_staged(leaf):
            for first, end in pairwise(_bounds(leaf)):
                self._start_rows(leaf, first, end)
            return
        while self._reading and self._held + leaf.host_bytes > MOST_IN_FLIGHT:
            self._send_oldest()
        piece = _Piece(leaf, None, 0, leaf.shape, True, leaf.stored_bytes)
        self._reading.append((piece, self._pool.submit(leaf.read)))
        self._held += leaf.host_bytes

    def finish(self) -> list[jax.Array]:
        """Returns all leaves, when they are on the device."""
        while self._reading:
            self._send_oldest()
        return jax.block_until_ready(self._filled)

    def release(self) -> None:
        """Waits for copies from the buffers and unlocks them."""
        try:
            jax.block_until_ready([rows for _, rows in self._copying])
        finally:
            with ExitStack() as unlocked:
                # All of them, also if one cannot be unlocked.
                for buffer in self._buffers:
                    unlocked.callback(buffer.unlock)
        if self._why_pageable:
            _LOG.warning("weights are copied through pageable memory: %s", self._why_pageable)

    def _start_rows(self, leaf: StoredLeaf, first: int, end: int) -> None:
        last, rows = leaf.num_rows, _rows_of_piece(leaf)
        # The last piece has as many rows as the others, since each number of rows is a program of its own.
        begin = min(first, last - rows)
        whole = rows == last
        shape = leaf.stored_shape if whole else (rows, leaf.row_elements)
        share = leaf.stored_bytes * end // last - leaf.stored_bytes * first // last
        piece = _Piece(leaf, self._take_buffer(), begin, shape, end == last, share)
        self._reading.append((piece, self._pool.submit(self._read, piece)))

    def _read(self, piece: _Piece) -> Shaped[np.ndarray, "..."]:
        assert piece.buffer is not None, piece
        assert self._client is not None, piece
        if not self._why_pageable:
            self._why_pageable = piece.buffer.lock(self._client)
        rows = piece.buffer.view(piece.shape, piece.leaf.dtype)
        piece.leaf.read_rows(rows.reshape(-1), piece.first)
        return rows

    def _take_buffer(self) -> Buffer:
        """Returns a buffer from which no copy is in flight."""
        if not self._free and len(self._buffers) < self._most_buffers:
            self._buffers.append(Buffer())
            return self._buffers[-1]
        while not self._free:
            if self._reading:
                self._send_oldest()
            # The copy that has just been started runs on while the next piece is awaited.
            while len(self._copying) > (1 if self._reading else 0):
                buffer, rows = self._copying.popleft()
                jax.block_until_ready(rows)
                self._free.append(buffer)
        return self._free.pop()

    def _send_oldest(self) -> None:
        """Starts the copy to the device of what was first to be read, when that is done."""
        piece, reading = self._reading.popleft()
        read, leaf = reading.result(), piece.leaf
        array = jax.device_put(read, self._device)
        if piece.buffer is None:
            # The memory counts as held until the copy is done.
            self._filled.append(jax.block_until_ready(array))
            self._arrived(leaf)
            self._held -= leaf.host_bytes
        else:
            self._copying.append((piece.buffer, array))
            self._place(piece, array)
        self._advance(piece.stored_bytes)

    def _place(self, piece: _Piece, rows: jax.Array) -> None:
        """Makes rows on the device a part of their leaf, or the leaf."""
        leaf = piece.leaf
        if piece.shape != leaf.stored_shape:
            if piece.first == 0:
                self._filled.append(jnp.empty(leaf.stored_shape, leaf.dtype, device=self._device))
            self._filled[-1] = _write_rows(self._filled[-1], rows, np.int32(piece.first))
        else:
            self._filled.append(rows)
        if piece.is_last:
            if not leaf.arrangement.moves_nothing:
                self._filled[-1] = _arrange(self._filled[-1], leaf.arrangement)
            self._arrived(leaf)

    def _arrived(self, leaf: StoredLeaf) -> None:
        """Divides a leaf that has arrived, before the next one does, so that the first device never holds them all."""
        if self._placed is not None:
            self._filled[-1] = jax.block_until_ready(self._placed(leaf.target, self._filled[-1]))


def _staging_client(
    device: jax.Device | Sharding | None,  # pyright: ignore[reportInvalidTypeForm]
) -> Client | None:
    """Returns the client of the one device for which leaves are staged; `None` if they are not."""
    devices = jax.device_put(np.empty(0, np.uint8), device).devices()
    first = next(iter(devices))
    return first.client if len(devices) == 1 and first.platform != "cpu" else None


def _why_pageable(client: Client) -> str:
    """Locks and unlocks one page; returns why that failed, empty if it did not."""
    page = aligned((mmap.PAGESIZE,), np.dtype(np.uint8), mmap.PAGESIZE)
    try:
        client.dma_map(page.ctypes.data, page.nbytes)
        client.dma_unmap(page.ctypes.data)
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def _is_staged(leaf: StoredLeaf) -> bool:
    small = leaf.num_rows * leaf.row_elements * leaf.dtype.itemsize <= SMALL_BYTES
    return not (small or leaf.offset) and leaf.row_elements * leaf.dtype.itemsize <= BUFFER_BYTES


def _rows_of_piece(leaf: StoredLeaf) -> int:
    """Returns the rows of each piece of a leaf, as many as the fewest pieces need."""
    most = BUFFER_BYTES // (leaf.row_elements * leaf.dtype.itemsize)
    pieces = -(-leaf.num_rows // most)
    return -(-leaf.num_rows // pieces)


def _bounds(leaf: StoredLeaf) -> Iterator[int]:
    """Yields the row at which each piece begins, and the number of rows."""
    yield from range(0, leaf.num_rows, _rows_of_piece(leaf))
    yield leaf.num_rows


@partial(jax.jit, donate_argnums=0)
def _write_rows(
    leaf: Shaped[jax.Array, "..."],
    rows: Shaped[jax.Array, "rows elements"],
    first: Int[jax.Array, ""] | np.int32,
) -> Shaped[jax.Array, "..."]:
    """Writes rows into a leaf from row `first` on. Donates `leaf`."""
    flat = leaf.reshape(-1, rows.shape[1])
    return jax.lax.dynamic_update_slice_in_dim(flat, rows, first, 0).reshape(leaf.shape)


@partial(jax.jit, static_argnums=1)
def _arrange(
    stored: Shaped[jax.Array, "..."], arrangement: Arrangement
) -> Shaped[jax.Array, "..."]:
    return arrangement.apply(stored, jnp)

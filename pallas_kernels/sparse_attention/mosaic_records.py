"""Gather of records from global memory into tiles in shared memory: cp.async, loads, decoding, prefetch (inline PTX).

Eight threads load a row, 16 bytes each at a time; a warpgroup loads 16 rows at once. Tiles lie in shared memory as
(rows / 8, columns / 64, 8, 64) 16-bit elements with the usual XOR swizzle of 16-byte pieces. For the interpreter there
are `gather_plainly` and `decode_plainly`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.formats.latent_records import GROUP
from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, TILE
from pallas_kernels.mosaic.dialects import (
    Value,
    add,
    arith,
    constant,
    divide,
    elements,
    i32,
    inline,
    ir,
    llvm,
    memref,
    times,
    utils,
    vector,
)
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import swizzled
from pallas_kernels.mosaic.words import (
    at,
    decoded,
    do,
    flat,
    four,
    four_words,
    fragments,
    i64,
    of_bytes,
    thread,
    wide,
    words_of,
)

PIECE = 16
"""Bytes that a thread loads at once."""
_THREADS_PER_ROW = 8
_AT_ONCE = PIECE * _THREADS_PER_ROW
_ROWS_AT_ONCE = 16
TURNS = TILE // _ROWS_AT_ONCE
_SWIZZLED_ROW = 128
_SWIZZLED_BYTES = 8 * _SWIZZLED_ROW


@dataclass(frozen=True)
class Place:
    """Location in a record of the elements that become columns of a tile.

    Attributes:
        start: offset of their first byte.
        columns: number of elements.
        scales: offset of the first byte of their scales, one per group of 128; `None` for 16-bit elements.
    """

    start: int
    columns: int
    scales: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of the elements in a record."""
        return self.columns * (2 if self.scales is None else 1)

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes per thread and row."""
        return self.row_bytes // _AT_ONCE


@dataclass(frozen=True)
class Rows:
    """The records of one tile.

    Attributes:
        records: the pool of records, in global memory.
        slots: [tokens, topk], in global memory.
        token: the row of `slots`.
        first: the tile's first column of that row.
        count: number of valid columns of that row; rows of the tile past it become zeros.
    """

    records: Ref
    slots: Ref
    token: Array
    first: Array
    count: Array


def copy(rows: Rows, tile: Ref, place: Place, dtype: DTypeLike) -> None:
    """Issues `cp.async` copies of 16-bit elements into a tile; `wait_for_copies` waits for their arrival."""
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), plgpu.RefType(), scalar, scalar, scalar)

    @inline(arg_types=(*types, plgpu.RefType(swizzled(COLUMN_TILE, dtype))))
    def run(_: Value, records: Value, slots: Value, *others: Value) -> None:
        *scalars, target = others
        token, first, count = (scalar.registers.item() for scalar in scalars)
        target = llvm.ptrtoint(i32(), utils.memref_ptr(target))
        member = divide(thread(), _THREADS_PER_ROW)[1]
        target = add(target, _in_tile(place, constant(0), member))
        for turn in range(TURNS):
            start, is_chosen = _start_of_row(records, slots, token, first, count, turn)
            own = at(start, wide(times(member, PIECE)))
            size = arith.select(is_chosen, constant(PIECE), constant(0))
            for number in range(place.pieces):
                source = at(own, place.start + number * _AT_ONCE)
                there = add(target, _further(place, turn, number))
                code = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
                do(code, "r,l,r", there, _address(source), size)

    run(rows.records, rows.slots, rows.token, rows.first, rows.count, tile)


def wait_for_copies() -> None:
    """Waits for all `cp.async` copies of this thread."""

    @inline()
    def run(_: Value) -> None:
        do("cp.async.wait_all;", "")

    run()


def load(rows: Rows, place: Place, turns: Sequence[int] = range(TURNS)) -> tuple[Array, Array]:
    """Issues the loads of 8-bit elements and their scales in some turns; the result is only meant for `store`."""
    loads = len(turns) * place.pieces
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), plgpu.RefType(), scalar, scalar, scalar)
    result = [
        plgpu.ShapeDtypeStruct((128 * count,), jnp.dtype(jnp.int32), layout=flat(128 * count))
        for count in (4 * loads, loads)
    ]

    @inline(arg_types=types, return_type=result)
    def run(_: Value, records: Value, slots: Value, *scalars: Value) -> list[Value]:
        token, first, count = (scalar.registers.item() for scalar in scalars)
        member = divide(thread(), _THREADS_PER_ROW)[1]
        numbers, scales = [], []
        for turn in turns:
            start, is_chosen = _start_of_row(records, slots, token, first, count, turn)
            own = at(start, wide(times(member, PIECE)))
            for number in range(place.pieces):
                source = at(own, place.start + number * _AT_ONCE)
                numbers.append(_chosen(is_chosen, llvm.load(four_words(), source)))
                source = at(start, (place.scales or 0) + 4 * number)
                scales.append(_chosen(is_chosen, llvm.load(i32(), source)))
        fours = [four(scales[first : first + 4]) for first in range(0, len(scales), 4)]
        return [fragments(numbers), fragments(fours)]

    numbers, scales = run(rows.records, rows.slots, rows.token, rows.first, rows.count)
    return numbers, scales


def store(
    words: tuple[Array, Array],
    tile: Ref,
    place: Place,
    dtype: DTypeLike,
    turns: Sequence[int] = range(TURNS),
) -> None:
    """Decodes the words of `load` of the same turns into a tile."""
    types = (
        plgpu.RefType(swizzled(COLUMN_TILE, dtype)),
        *(flat(array.shape[0]) for array in words),
    )

    @inline(arg_types=types)
    def run(_: Value, target: Value, numbers: Value, scales: Value) -> None:
        target = utils.memref_ptr(target)
        numbers, scales = list(numbers.registers.flat), elements(scales)
        member = divide(thread(), _THREADS_PER_ROW)[1]
        # Threads of the second half of a row store their pieces in the other order, which avoids bank conflicts.
        late = arith.cmpi(arith.CmpIPredicate.uge, member, constant(_THREADS_PER_ROW // 2))
        column, inside = divide(member, 4)
        starts = []
        for half in (0, 1):
            which = arith.select(late, constant(1 - half), constant(half))
            piece = add(times(inside, 2), which)
            starts.append(at(target, wide(_in_tile(place, column, piece))))
        for nth, turn in enumerate(turns):
            for number in range(place.pieces):
                index = nth * place.pieces + number
                both = decoded(words_of(numbers[index]), scales[index], dtype)
                for half, start in enumerate(starts):
                    value = arith.select(late, both[1 - half], both[half])
                    llvm.store(value, at(start, _further(place, turn, number)))

    run(tile, *words)


def prefetch(rows: Rows, *, record_bytes: int) -> None:
    """Prefetches the records of a tile to L2."""
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), plgpu.RefType(), scalar, scalar, scalar)

    @inline(arg_types=types)
    def run(_: Value, records: Value, slots: Value, *scalars: Value) -> None:
        token, first, count = (scalar.registers.item() for scalar in scalars)
        member = divide(thread(), _THREADS_PER_ROW)[1]
        for turn in range(TURNS):
            start, _ = _start_of_row(records, slots, token, first, count, turn)
            for line in range(0, record_bytes, 128 * _THREADS_PER_ROW):
                offset = arith.minui(add(times(member, 128), line), constant(record_bytes - 1))
                do("prefetch.global.L2 [$0];", "l", _address(at(start, wide(offset))))

    run(rows.records, rows.slots, rows.token, rows.first, rows.count)


def gather_plainly(rows: Rows) -> Array:
    """Returns the tile's records, for the interpreter; rows past the count are zeros."""
    records = rows.records[...]
    records = records.reshape(-1, records.shape[-1])
    place = rows.first + jnp.arange(TILE, dtype=jnp.int32)
    is_chosen = place < rows.count
    slots = rows.slots[...][rows.token][jnp.where(is_chosen, place, 0)]
    chosen = records[jnp.where(is_chosen, slots, 0)]
    return jnp.where(is_chosen[:, None], chosen, jnp.zeros_like(chosen))


def decode_plainly(chosen: Array, place: Place, dtype: DTypeLike) -> Array:
    """Returns the elements in one place of records as `store` would write them, for the interpreter."""
    size = chosen.dtype.itemsize
    numbers = chosen[:, place.start // size : (place.start + place.row_bytes) // size]
    if size > 1:
        return numbers
    if place.scales is None:
        return lax.bitcast_convert_type(numbers.reshape(TILE, -1, 2), dtype)
    groups = place.columns // GROUP
    scales = chosen[:, place.scales : place.scales + 4 * groups].reshape(TILE, groups, 4)
    scales = jnp.repeat(lax.bitcast_convert_type(scales, jnp.float32), GROUP, axis=1)
    numbers = lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn).astype(jnp.float32)
    return (numbers * scales).astype(dtype)


def _start_of_row(
    records: Value, slots: Value, token: Value, first: Value, count: Value, turn: int
) -> tuple[Value, Value]:
    """Returns the address of the record of this thread's row, and whether the row is within the count.

    Rows past the count get the address of the pool's first record.
    """
    index = ir.IndexType.get()
    row = add(divide(thread(), _THREADS_PER_ROW)[0], turn * _ROWS_AT_ONCE)
    place = arith.addi(first, row)
    is_chosen = arith.cmpi(arith.CmpIPredicate.slt, place, count)
    place = arith.select(is_chosen, place, constant(0))
    slot = memref.load(slots, [arith.index_cast(index, number) for number in (token, place)])
    slot = arith.select(is_chosen, slot, constant(0))
    kind = ir.MemRefType(records.type)
    size = kind.shape[-1] * utils.bytewidth(kind.element_type)
    return at(utils.memref_ptr(records), of_bytes(slot, size)), is_chosen


def _in_tile(place: Place, column: Value, piece: Value) -> Value:
    """Returns the byte offset in a tile of a piece of this thread's first row, in a given group of 64 columns."""
    row = divide(thread(), _THREADS_PER_ROW)[0]
    eight, turned = divide(row, 8)
    start = times(arith.addi(times(eight, place.columns // 64), column), _SWIZZLED_BYTES)
    start = add(start, times(turned, _SWIZZLED_ROW))
    return add(start, times(arith.xori(piece, turned), PIECE))


def _further(place: Place, turn: int, number: int) -> int:
    """Returns the byte distance from the thread's first piece to the one of a later row and of later columns."""
    rows = turn * _ROWS_AT_ONCE // 8 * (place.columns // 64)
    columns = number if place.scales is None else 2 * number
    return (rows + columns) * _SWIZZLED_BYTES


def _chosen(is_chosen: Value, loaded: Value) -> Value:
    zero = constant(0)
    if isinstance(loaded.type, ir.VectorType):
        zero = vector.broadcast(loaded.type, zero)
    return arith.select(is_chosen, loaded, zero)


def _address(pointer: Value) -> Value:
    return llvm.ptrtoint(i64(), pointer)

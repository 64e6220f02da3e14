"""Chosen records on their way into tiles of shared memory, which Pallas has no words for: a gather of rows.

Eight threads take a row, 16 bytes each at a time, and a warpgroup 16 rows at once. Tiles lie in shared memory as
(rows / 8, columns / 64, 8, 64) numbers of 16 bits, where each row's pieces of 16 bytes are swapped by exclusive or with
the row's number. The interpreter takes the plain way.
"""

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
_TURNS = TILE // _ROWS_AT_ONCE
_SWIZZLED_ROW = 128
_SWIZZLED_BYTES = 8 * _SWIZZLED_ROW


@dataclass(frozen=True)
class Place:
    """Where numbers that become columns of a tile are in a record.

    Attributes:
        start: their first byte.
        columns: how many they are.
        scales: the first byte of their scales, of which each group of 128 has one; `None` for numbers of 16 bits.
    """

    start: int
    columns: int
    scales: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of the numbers in a record."""
        return self.columns * (2 if self.scales is None else 1)

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes that a thread moves of each of its rows."""
        return self.row_bytes // _AT_ONCE


@dataclass(frozen=True)
class Rows:
    """Which records a tile is made of.

    Attributes:
        records: all of them, in global memory.
        slots: [tokens, topk], in global memory.
        token: the row of `slots`.
        first: the tile's first place in that row.
        count: places of that row that are chosen; the tile's other rows are zeros, and read nothing of their own.
    """

    records: Ref
    slots: Ref
    token: Array
    first: Array
    count: Array


def copy(rows: Rows, tile: Ref, place: Place, dtype: DTypeLike) -> None:
    """Starts copying numbers of 16 bits into a tile; `wait_for_copies` says when they have arrived."""
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), plgpu.RefType(), scalar, scalar, scalar)

    @inline(arg_types=(*types, plgpu.RefType(swizzled(COLUMN_TILE, dtype))))
    def run(_: Value, records: Value, slots: Value, *others: Value) -> None:
        *scalars, target = others
        token, first, count = (scalar.registers.item() for scalar in scalars)
        target = llvm.ptrtoint(i32(), utils.memref_ptr(target))
        member = divide(thread(), _THREADS_PER_ROW)[1]
        target = add(target, _in_tile(place, constant(0), member))
        for turn in range(_TURNS):
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
    """Waits for all copies that this thread has started."""

    @inline()
    def run(_: Value) -> None:
        do("cp.async.wait_all;", "")

    run()


def load(rows: Rows, place: Place) -> tuple[Array, Array]:
    """Starts loading numbers of 8 bits and their scales; returns them as words that only `store` can tell apart."""
    loads = _TURNS * place.pieces
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), plgpu.RefType(), scalar, scalar, scalar)
    result = [
        plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=flat(128 * count))
        for count in (4 * loads, loads)
    ]

    @inline(arg_types=types, return_type=result)
    def run(_: Value, records: Value, slots: Value, *scalars: Value) -> list[Value]:
        token, first, count = (scalar.registers.item() for scalar in scalars)
        member = divide(thread(), _THREADS_PER_ROW)[1]
        numbers, scales = [], []
        for turn in range(_TURNS):
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


def store(words: tuple[Array, Array], tile: Ref, place: Place, dtype: DTypeLike) -> None:
    """Decodes what `load` returned into a tile."""
    types = (
        plgpu.RefType(swizzled(COLUMN_TILE, dtype)),
        *(flat(array.shape[0]) for array in words),
    )

    @inline(arg_types=types)
    def run(_: Value, target: Value, numbers: Value, scales: Value) -> None:
        target = utils.memref_ptr(target)
        numbers, scales = list(numbers.registers.flat), elements(scales)
        member = divide(thread(), _THREADS_PER_ROW)[1]
        # Threads of the second half of a row begin with their other piece, or they would meet the first in a bank.
        late = arith.cmpi(arith.CmpIPredicate.uge, member, constant(_THREADS_PER_ROW // 2))
        column, inside = divide(member, 4)
        starts = []
        for half in (0, 1):
            which = arith.select(late, constant(1 - half), constant(half))
            piece = add(times(inside, 2), which)
            starts.append(at(target, wide(_in_tile(place, column, piece))))
        for turn in range(_TURNS):
            for number in range(place.pieces):
                index = turn * place.pieces + number
                both = decoded(words_of(numbers[index]), scales[index], dtype)
                for half, start in enumerate(starts):
                    value = arith.select(late, both[1 - half], both[half])
                    llvm.store(value, at(start, _further(place, turn, number)))

    run(tile, *words)


def prefetch(rows: Rows, *, record_bytes: int) -> None:
    """Asks for the records of a tile to be brought near."""
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), plgpu.RefType(), scalar, scalar, scalar)

    @inline(arg_types=types)
    def run(_: Value, records: Value, slots: Value, *scalars: Value) -> None:
        token, first, count = (scalar.registers.item() for scalar in scalars)
        member = divide(thread(), _THREADS_PER_ROW)[1]
        for turn in range(_TURNS):
            start, _ = _start_of_row(records, slots, token, first, count, turn)
            for line in range(0, record_bytes, 128 * _THREADS_PER_ROW):
                offset = arith.minui(add(times(member, 128), line), constant(record_bytes - 1))
                do("prefetch.global.L2 [$0];", "l", _address(at(start, wide(offset))))

    run(rows.records, rows.slots, rows.token, rows.first, rows.count)


def gather_plainly(rows: Rows) -> Array:
    """Returns the tile's records as the interpreter can; those that are not chosen are zeros."""
    records = rows.records[...]
    records = records.reshape(-1, records.shape[-1])
    place = rows.first + jnp.arange(TILE, dtype=jnp.int32)
    is_chosen = place < rows.count
    slots = rows.slots[...][rows.token][jnp.where(is_chosen, place, 0)]
    chosen = records[jnp.where(is_chosen, slots, 0)]
    return jnp.where(is_chosen[:, None], chosen, jnp.zeros_like(chosen))


def decode_plainly(chosen: Array, place: Place, dtype: DTypeLike) -> Array:
    """Returns the numbers in one place of records, as `store` would write them."""
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
    """Returns where the record of this thread's row begins, and whether it is chosen; else it is the first of all."""
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
    """Returns where in a tile a piece of the first of this thread's rows lies, in 64 columns, in bytes."""
    row = divide(thread(), _THREADS_PER_ROW)[0]
    eight, turned = divide(row, 8)
    start = times(arith.addi(times(eight, place.columns // 64), column), _SWIZZLED_BYTES)
    start = add(start, times(turned, _SWIZZLED_ROW))
    return add(start, times(arith.xori(piece, turned), PIECE))


def _further(place: Place, turn: int, number: int) -> int:
    """Returns how much further the same thread's piece of another of its rows, and of other columns, lies."""
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

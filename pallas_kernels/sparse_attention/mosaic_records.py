"""Chosen records on their way into tiles of shared memory, which Pallas has no words for: a gather of rows.

Eight threads take a row, 16 bytes each at a time, and a warpgroup 16 rows at once. Tiles lie in shared memory as
(rows / 8, columns / 64, 8, 64) numbers of 16 bits, where each row's pieces of 16 bytes are swapped by exclusive or with
the row's number. The interpreter takes the plain way.
"""

from dataclasses import dataclass
from typing import Any

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.typing import DTypeLike
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_kernels.latent_attention.mosaic_kernel import swizzled
from pallas_kernels.latent_attention.mosaic_pieces import Ref
from pallas_kernels.latent_attention.mosaic_schedule import TILE
from pallas_kernels.mosaic_rows import flat_pieces
from pallas_kernels.record_codec import GROUP

# MLIR's values have types that are private to JAX.
Value = Any
_arith: Any = arith
_llvm: Any = llvm
_memref: Any = memref
_vector: Any = vector
_utils: Any = mosaic_utils
_inline: Any = plgpu.inline_mgpu
_ir: Any = _utils.ir

PIECE = 16
"""Bytes that a thread loads at once."""
_THREADS_PER_ROW = 8
_AT_ONCE = PIECE * _THREADS_PER_ROW
_ROWS_AT_ONCE = 16
_TURNS = TILE // _ROWS_AT_ONCE
_SWIZZLED_ROW = 128
_SWIZZLED_BYTES = 8 * _SWIZZLED_ROW

# Two registers of two numbers of 16 bits from one of four e4m3 and a scale. A product is rounded once to float32 and
# once more, as the codec has it.
_DECODE = """{{
    .reg .b16 low, high, h0, h1, h2, h3;
    .reg .b32 first, second;
    .reg .f32 f0, f1, f2, f3;
    mov.b32 {{low, high}}, $2;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {{h0, h1}}, first;
    mov.b32 {{h2, h3}}, second;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    mul.f32 f0, f0, $3;
    mul.f32 f1, f1, $3;
    mul.f32 f2, f2, $3;
    mul.f32 f3, f3, $3;
    cvt.rn.{kind}.f32 $0, f1, f0;
    cvt.rn.{kind}.f32 $1, f3, f2;
}}"""
_KINDS = {"bfloat16": "bf16x2", "float16": "f16x2"}


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

    @_inline(arg_types=(*types, plgpu.RefType(swizzled(dtype))))
    def run(_: Value, records: Value, slots: Value, *others: Value) -> None:
        *scalars, target = others
        token, first, count = (scalar.registers.item() for scalar in scalars)
        target = _llvm.ptrtoint(_i32(), _utils.memref_ptr(target))
        member = _divide(_thread(), _THREADS_PER_ROW)[1]
        target = _add(target, _in_tile(place, _c(0), member))
        for turn in range(_TURNS):
            start, is_chosen = _start_of_row(records, slots, token, first, count, turn)
            own = _at(start, _wide(_times(member, PIECE)))
            size = _arith.select(is_chosen, _c(PIECE), _c(0))
            for number in range(place.pieces):
                source = _at(own, place.start + number * _AT_ONCE)
                at = _add(target, _further(place, turn, number))
                _do(
                    "cp.async.cg.shared.global [$0], [$1], 16, $2;",
                    "r,l,r",
                    at,
                    _address(source),
                    size,
                )

    run(rows.records, rows.slots, rows.token, rows.first, rows.count, tile)


def wait_for_copies() -> None:
    """Waits for all copies that this thread has started."""

    @_inline()
    def run(_: Value) -> None:
        _do("cp.async.wait_all;", "")

    run()


def load(rows: Rows, place: Place) -> tuple[Array, Array]:
    """Starts loading numbers of 8 bits and their scales; returns them as words that only `store` can tell apart."""
    loads = _TURNS * place.pieces
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), plgpu.RefType(), scalar, scalar, scalar)
    result = [
        plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout=_flat(128 * count))
        for count in (4 * loads, loads)
    ]

    @_inline(arg_types=types, return_type=result)
    def run(_: Value, records: Value, slots: Value, *scalars: Value) -> list[Value]:
        token, first, count = (scalar.registers.item() for scalar in scalars)
        member = _divide(_thread(), _THREADS_PER_ROW)[1]
        numbers, scales = [], []
        for turn in range(_TURNS):
            start, is_chosen = _start_of_row(records, slots, token, first, count, turn)
            own = _at(start, _wide(_times(member, PIECE)))
            for number in range(place.pieces):
                at = _at(own, place.start + number * _AT_ONCE)
                numbers.append(_chosen(is_chosen, _llvm.load(_words(4), at)))
                at = _at(start, (place.scales or 0) + 4 * number)
                scales.append(_chosen(is_chosen, _llvm.load(_i32(), at)))
        fours = [scales[first : first + 4] for first in range(0, len(scales), 4)]
        return [
            _fragments(numbers),
            _fragments([_vector.from_elements(_words(4), four) for four in fours]),
        ]

    numbers, scales = run(rows.records, rows.slots, rows.token, rows.first, rows.count)
    return numbers, scales


def store(words: tuple[Array, Array], tile: Ref, place: Place, dtype: DTypeLike) -> None:
    """Decodes what `load` returned into a tile."""
    types = (plgpu.RefType(swizzled(dtype)), *(_flat(array.shape[0]) for array in words))

    @_inline(arg_types=types)
    def run(_: Value, target: Value, numbers: Value, scales: Value) -> None:
        target = _utils.memref_ptr(target)
        numbers, scales = list(numbers.registers.flat), _elements(scales)
        member = _divide(_thread(), _THREADS_PER_ROW)[1]
        # Threads of the second half of a row begin with their other piece, or they would meet the first in a bank.
        late = _arith.cmpi(_arith.CmpIPredicate.uge, member, _c(_THREADS_PER_ROW // 2))
        column, inside = _divide(member, 4)
        starts = []
        for half in (0, 1):
            which = _arith.select(late, _c(1 - half), _c(half))
            piece = _add(_times(inside, 2), which)
            starts.append(_at(target, _wide(_in_tile(place, column, piece))))
        for turn in range(_TURNS):
            for number in range(place.pieces):
                index = turn * place.pieces + number
                both = _decoded(numbers[index], scales[index], dtype)
                for half, start in enumerate(starts):
                    value = _arith.select(late, both[1 - half], both[half])
                    _llvm.store(value, _at(start, _further(place, turn, number)))

    run(tile, *words)


def prefetch(rows: Rows, *, record_bytes: int) -> None:
    """Asks for the records of a tile to be brought near."""
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), plgpu.RefType(), scalar, scalar, scalar)

    @_inline(arg_types=types)
    def run(_: Value, records: Value, slots: Value, *scalars: Value) -> None:
        token, first, count = (scalar.registers.item() for scalar in scalars)
        member = _divide(_thread(), _THREADS_PER_ROW)[1]
        for turn in range(_TURNS):
            start, _ = _start_of_row(records, slots, token, first, count, turn)
            for line in range(0, record_bytes, 128 * _THREADS_PER_ROW):
                offset = _arith.minui(_add(_times(member, 128), line), _c(record_bytes - 1))
                _do("prefetch.global.L2 [$0];", "l", _address(_at(start, _wide(offset))))

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


def _flat(length: int) -> Any:  # noqa: ANN401 - private to JAX
    """Returns the layout of words of which each thread has as many."""
    (piece,) = flat_pieces(length, 4)
    return piece.layout


def _start_of_row(
    records: Value, slots: Value, token: Value, first: Value, count: Value, turn: int
) -> tuple[Value, Value]:
    """Returns where the record of this thread's row begins, and whether it is chosen; else it is the first of all."""
    index = _ir.IndexType.get()
    row = _add(_divide(_thread(), _THREADS_PER_ROW)[0], turn * _ROWS_AT_ONCE)
    place = _arith.addi(first, row)
    is_chosen = _arith.cmpi(_arith.CmpIPredicate.slt, place, count)
    place = _arith.select(is_chosen, place, _c(0))
    slot = _memref.load(slots, [_arith.index_cast(index, at) for at in (token, place)])
    slot = _arith.select(is_chosen, slot, _c(0))
    kind = _ir.MemRefType(records.type)
    size = kind.shape[-1] * _utils.bytewidth(kind.element_type)
    offset = _arith.muli(_wide(slot), _arith.constant(_i64(), size))
    return _at(_utils.memref_ptr(records), offset), is_chosen


def _in_tile(place: Place, column: Value, piece: Value) -> Value:
    """Returns where in a tile a piece of the first of this thread's rows lies, in 64 columns, in bytes."""
    row = _divide(_thread(), _THREADS_PER_ROW)[0]
    eight, turned = _divide(row, 8)
    start = _times(_arith.addi(_times(eight, place.columns // 64), column), _SWIZZLED_BYTES)
    start = _add(start, _times(turned, _SWIZZLED_ROW))
    return _add(start, _times(_xor(piece, turned), PIECE))


def _further(place: Place, turn: int, number: int) -> int:
    """Returns how much further the same thread's piece of another of its rows, and of other columns, lies."""
    rows = turn * _ROWS_AT_ONCE // 8 * (place.columns // 64)
    columns = number if place.scales is None else 2 * number
    return (rows + columns) * _SWIZZLED_BYTES


def _decoded(words: Value, scale: Value, dtype: DTypeLike) -> tuple[Value, Value]:
    """Returns 16 numbers of 16 bits, eight and eight, from 16 of 8 bits."""
    i32 = _i32()
    pair = _llvm.StructType.get_literal([i32, i32])
    scale = _arith.bitcast(_ir.F32Type.get(), scale)
    code = _DECODE.format(kind=_KINDS[jnp.dtype(dtype).name])
    numbers = []
    for place in range(4):
        word = _vector.extract(words, [], [place])
        both = _llvm.inline_asm(pair, [word, scale], code, "=r,=r,r,f")
        numbers += [_llvm.extractvalue(i32, both, [part]) for part in (0, 1)]
    first, second = (
        _vector.from_elements(_words(4), numbers[start : start + 4]) for start in (0, 4)
    )
    return first, second


def _fragments(registers: list[Value]) -> Value:
    """Returns the array that these vectors of four words are a thread's part of."""
    layout = _flat(128 * 4 * len(registers)).to_mgpu()
    held = np.empty(layout.registers_shape((128 * 4 * len(registers),)), dtype=object)
    for place, register in zip(np.ndindex(held.shape), registers, strict=True):
        held[place] = register
    return mosaic.FragmentedArray(_registers=held, _layout=layout, _is_signed=True)


def _elements(array: Value) -> list[Value]:
    """A thread's words."""
    return [
        _vector.extract(register, [], [place])
        for register in array.registers.flat
        for place in range(4)
    ]


def _chosen(is_chosen: Value, loaded: Value) -> Value:
    zero = _c(0)
    if isinstance(loaded.type, _ir.VectorType):
        zero = _vector.broadcast(loaded.type, zero)
    return _arith.select(is_chosen, loaded, zero)


def _at(start: Value, offset: Value | int) -> Value:
    if isinstance(offset, int):
        offset = _arith.constant(_i64(), offset)
    return _utils.getelementptr(start, [offset], _ir.IntegerType.get_signless(8))


def _words(count: int) -> Value:
    return _ir.VectorType.get((count,), _i32())


def _address(pointer: Value) -> Value:
    return _llvm.ptrtoint(_i64(), pointer)


def _do(code: str, kinds: str, *arguments: Value) -> None:
    """Does what an instruction says that returns nothing."""
    nothing = _ir.Type.parse("!llvm.void")
    _llvm.inline_asm(nothing, list(arguments), code, kinds, has_side_effects=True)


def _thread() -> Value:
    """The thread's number in its warpgroup."""
    return _divide(_utils.thread_idx(), 128)[1]


def _wide(value: Value) -> Value:
    return _arith.extui(_i64(), value)


def _divide(value: Value, by: int) -> tuple[Value, Value]:
    return _arith.divui(value, _c(by)), _arith.remui(value, _c(by))


def _times(value: Value, by: int) -> Value:
    return _arith.muli(value, _c(by))


def _add(value: Value, other: Value | int) -> Value:
    return _arith.addi(value, _c(other)) if isinstance(other, int) else _arith.addi(value, other)


def _xor(value: Value, other: Value) -> Value:
    return _arith.xori(value, other)


def _c(number: int) -> Value:
    return _utils.c(number, _i32())


def _i32() -> Value:
    return _ir.IntegerType.get_signless(32)


def _i64() -> Value:
    return _ir.IntegerType.get_signless(64)

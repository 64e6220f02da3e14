"""Loads of 8-bit keys and values as float16 operands of wgmma; Mosaic GPU's own loads and casts are too slow.

In wgmma's left-operand fragment a thread holds pairs of adjacent elements from several places of a row, while one
16-byte load gives it 16 adjacent elements. Therefore products contract the components of a head in a permuted order,
`_component`, the same for keys and queries.

Tiles lie in shared memory as (rows / 8, width / swizzle, 8, swizzle) with the usual XOR swizzle of 16-byte pieces. The
interpreter computes the same with plain indexing.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.mosaic.dialects import (
    Value,
    add,
    arith,
    constant,
    divide,
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
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, swizzle_of, swizzled

_PIECE = 16

# Each converts one register of four bytes to two registers of two float16 values.
_UNPACK = {
    "float8_e4m3fn": """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
    }""",
    # The float16 value 1024 + 128 + x has x with its sign bit flipped as its low byte.
    "int8": """{
        .reg .b32 turned, low, high, base;
        xor.b32 turned, $2, 0x80808080;
        prmt.b32 low, turned, 0x64646464, 0x4140;
        prmt.b32 high, turned, 0x64646464, 0x4342;
        mov.b32 base, 0x64806480;
        sub.f16x2 $0, low, base;
        sub.f16x2 $1, high, base;
    }""",
}


def gather_rows(ref: Ref, indices: tuple[Array, ...], *, interpret: bool) -> Array:
    """Returns `ref[indices]` from global memory; each index is one value per row or a scalar for all rows.

    Indices are not checked. Each thread loads the elements of its rows; it waits for a load only at its first use.
    """
    shape = next(index.shape for index in indices if index.shape)
    if interpret:
        return ref[...][tuple(jnp.broadcast_to(index, shape) for index in indices)]
    types = tuple(PER_ROW if index.shape else plgpu.Layout.WG_SPLAT(()) for index in indices)
    result = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=PER_ROW)

    @inline(arg_types=(plgpu.RefType(), *types), return_type=result)
    def load(_: Value, source: Value, *places: Value) -> Value:
        def element(register: tuple[int, ...]) -> Value:
            return memref.load(source, [_index(place, register) for place in places])

        return _fragments(
            PER_ROW, shape, element, is_signed=True if ref.dtype == jnp.int32 else None
        )

    return load(ref, *indices)


def load_right_operand(tile: Ref, stored: DTypeLike) -> Array:
    """Returns the transpose of queries [columns, head_dim], its rows in the order of `_component`."""
    columns, head_dim = tile.shape
    result = plgpu.ShapeDtypeStruct((head_dim, columns), tile.dtype, layout=WGMMA)
    swizzle = swizzle_of(head_dim * jnp.dtype(stored).itemsize)

    @inline(arg_types=(plgpu.RefType(),), return_type=result)
    def load(_: Value, source: Value) -> Value:
        index = ir.IndexType.get()
        warp, lane = _warp_and_lane()
        group, member = divide(lane, 4)

        def pair(register: tuple[int, ...]) -> Value:
            tall, wide, half = register[0], register[1], register[4]
            component = _component(group, warp, tall, half, swizzle)
            columns = [add(times(member, 2), ROW_TILE * wide + second) for second in (0, 1)]
            numbers = [
                memref.load(
                    source, [arith.index_cast(index, place) for place in (column, component)]
                )
                for column in columns
            ]
            return vector.from_elements(ir.VectorType.get((2,), numbers[0].type), numbers)

        return _fragments(WGMMA, (head_dim, columns), pair)

    return load(tile)


def load_left_operand(tile: Ref, tall: int) -> Array:
    """Returns 64 components of 8-bit keys as a float16 left operand in registers, in the order of `_component`."""
    head_dim = tile.shape[1]
    swizzle = swizzle_of(head_dim)
    result = plgpu.ShapeDtypeStruct((WGMMA_ROWS, 64), jnp.dtype(jnp.float16), layout=WGMMA)

    @inline(arg_types=(plgpu.RefType(swizzled(head_dim, tile.dtype)),), return_type=result)
    def load(_: Value, source: Value) -> Value:
        start = utils.memref_ptr(source)
        warp, lane = _warp_and_lane()
        group, member = divide(lane, 4)
        per_member = swizzle // _PIECE // 4
        tile_of, turn = divmod(tall, per_member)
        registers = {}
        for half in (0, 1):
            piece = arith.xori(add(times(member, per_member), turn), _turned(group, swizzle))
            offset = times(add(times(warp, 2), half), ROW_TILE * head_dim)
            offset = add(offset, add(times(group, swizzle), tile_of * ROW_TILE * swizzle))
            words = _load_words(start, add(offset, times(piece, _PIECE)))
            for place, word in enumerate(words):
                for part, number in enumerate(_unpack(word, tile.dtype)):
                    registers[2 * place + part, half] = number

        return _fragments(
            WGMMA, (WGMMA_ROWS, 64), lambda register: registers[register[1], register[4]]
        )

    return load(tile)


def unpack_values(packed: Ref, wide: Ref, first: Array, stop: Array) -> None:
    """Converts an 8-bit tile [64, head_dim] in shared memory to float16; rows outside [first, stop) become zeros.

    Without bank conflicts: each group of eight threads that the hardware serves together takes half of two rows whose
    numbers differ in bits 0 and 2, so its loads and its stores go to different banks.
    """
    head_dim = packed.shape[1]
    swizzle = swizzle_of(head_dim)
    types = (
        plgpu.RefType(swizzled(head_dim, packed.dtype)),
        plgpu.RefType(swizzled(head_dim, jnp.float16)),
        plgpu.Layout.WG_SPLAT(()),
        plgpu.Layout.WG_SPLAT(()),
    )

    @inline(arg_types=types)
    def run(_: Value, source: Value, target: Value, *bounds: Value) -> None:
        source, target = utils.memref_ptr(source), utils.memref_ptr(target)
        first, stop = (bound.registers.item() for bound in bounds)
        warp, lane = _warp_and_lane()
        pair, inside = divide(lane, 8)
        second, member = divide(inside, 4)
        row = arith.xori(pair, times(second, 5))
        for half in (0, 1):
            rows = add(times(warp, 2), half)
            position = add(times(rows, ROW_TILE), row)
            is_visible = arith.andi(_at_least(position, first), _at_least(add(stop, -1), position))
            for tall in range(head_dim // 64):
                tile_of, turn = divmod(tall, swizzle // 64)
                piece = arith.xori(add(member, 4 * turn), _turned(row, swizzle))
                offset = add(times(rows, ROW_TILE * head_dim), tile_of * ROW_TILE * swizzle)
                offset = add(offset, add(times(row, swizzle), times(piece, _PIECE)))
                zero = constant(0)
                words = [
                    arith.select(is_visible, word, zero) for word in _load_words(source, offset)
                ]
                numbers = [number for word in words for number in _unpack(word, packed.dtype)]
                offset = add(times(rows, 2 * ROW_TILE * head_dim), tall * ROW_TILE * 128)
                offset = add(offset, times(row, 128))
                for place in (0, 1):
                    piece = arith.xori(add(times(member, 2), place), row)
                    at = _at(target, add(offset, times(piece, _PIECE)))
                    eight = utils.vector_concat(numbers[4 * place : 4 * place + 4])
                    llvm.store(utils.bitcast(eight, _words_type()), at)

    run(packed, wide, first, stop)


def _component(group: Value, warp: Value, tall: int, half: int, swizzle: int) -> Value:
    """Returns the head component that row `64 * tall + 16 * warp + 8 * half + group` of the operands holds."""
    per_member = swizzle // _PIECE // 4
    tile_of, turn = divmod(tall, per_member)
    member, rest = divide(group, 2)
    piece = add(times(member, per_member), turn)
    inside = add(add(times(warp, 4), rest), 2 * half)
    return add(add(times(piece, _PIECE), inside), tile_of * swizzle)


def _fragments(
    layout: Any,  # noqa: ANN401 - a layout
    shape: tuple[int, ...],
    element: Callable[[tuple[int, ...]], Value],
    *,
    is_signed: bool | None = None,
) -> Value:
    """Builds an array; `element` returns the value of one of this thread's registers."""
    layout = layout.to_mgpu()
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for register in np.ndindex(registers.shape):
        value = element(register)
        if not isinstance(value.type, ir.VectorType):
            value = vector.broadcast(ir.VectorType.get((1,), value.type), value)
        registers[register] = value
    return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def _index(place: Value, register: tuple[int, ...]) -> Value:
    """Returns the index in one register of a vector of indices, or a scalar index."""
    if not place.shape:
        return arith.index_cast(ir.IndexType.get(), place.registers.item())
    value = vector.extract(place.registers[register], [], [0])
    return arith.index_cast(ir.IndexType.get(), value)


def _unpack(word: Value, dtype: DTypeLike) -> list[Value]:
    """Returns four bytes as two pairs of float16 values."""
    pair = llvm.StructType.get_literal([i32(), i32()])
    both = llvm.inline_asm(pair, [word], _UNPACK[jnp.dtype(dtype).name], "=r,=r,r")
    two = ir.VectorType.get((2,), ir.F16Type.get())
    return [utils.bitcast(llvm.extractvalue(i32(), both, [part]), two) for part in (0, 1)]


def _load_words(start: Value, offset: Value) -> list[Value]:
    words = llvm.load(_words_type(), _at(start, offset))
    return [vector.extract(words, [], [place]) for place in range(4)]


def _at(start: Value, offset: Value) -> Value:
    return utils.getelementptr(start, [offset], ir.IntegerType.get_signless(8))


def _words_type() -> Value:
    return ir.VectorType.get((4,), i32())


def _warp_and_lane() -> tuple[Value, Value]:
    warp, lane = divide(utils.thread_idx(), 32)
    return divide(warp, 4)[1], lane


def _turned(row: Value, swizzle: int) -> Value:
    """Returns the XOR mask of a row's 16-byte pieces: the row's address in units of 128 bytes."""
    return row if swizzle == 128 else divide(row, 128 // swizzle)[0]


def _at_least(value: Value, other: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.sge, value, other)

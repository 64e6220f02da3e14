"""Stream compaction in shared memory: each warp appends the values it selects to its own list (inline PTX).

Array arguments may have any layout that gives each thread whole vectors. The interpreter knows neither layouts nor
inline PTX; there a warpgroup has one list, which spans the memory of its four.
"""

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic.dialects import (
    Value,
    arith,
    constant,
    elements,
    i32,
    inline,
    llvm,
    utils,
    vector,
)
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.warps import WARPS, own_warp

# Operands: $0 count after, $1 value, $2 and $3 bounds [low, high), $4 address of the list, $5 count before, $6
# capacity.
_APPEND = """{
    .reg .pred is_kept, has_room;
    .reg .b32 kept, place, lanes;
    setp.ge.f32 is_kept, $1, $2;
    setp.lt.and.f32 is_kept, $1, $3, is_kept;
    vote.sync.ballot.b32 kept, is_kept, 0xffffffff;
    mov.u32 lanes, %lanemask_lt;
    and.b32 place, kept, lanes;
    popc.b32 place, place;
    add.u32 place, place, $5;
    setp.lt.and.u32 has_room, place, $6, is_kept;
    mad.lo.u32 place, place, 4, $4;
    @has_room st.shared.f32 [place], $1;
    popc.b32 kept, kept;
    add.u32 $0, $5, kept;
}"""

# Operands: $0 number of lower lanes with a set bit, $1 number of all lanes with a set bit, $2 this lane's bit.
_COUNT = """{
    .reg .pred is_set;
    .reg .b32 bits, lanes;
    setp.ne.b32 is_set, $2, 0;
    vote.sync.ballot.b32 bits, is_set, 0xffffffff;
    mov.u32 lanes, %lanemask_lt;
    and.b32 lanes, lanes, bits;
    popc.b32 $0, lanes;
    popc.b32 $1, bits;
}"""

# Operands: $0 address of the table, $1 index, $2 value, $3 whether to store it.
_STORE = """{
    .reg .pred is_chosen;
    .reg .b32 at;
    setp.ne.b32 is_chosen, $3, 0;
    mad.lo.u32 at, $1, 4, $0;
    @is_chosen st.shared.b32 [at], $2;
}"""


def append(
    found: Ref,
    first: Array,
    counts: Array,
    numbers: Array,
    low: Array,
    high: Array,
    *,
    room: int,
    layout: Layout,
    interpret: bool,
) -> Array:
    """Appends each warp's values in [low, high) to that warp's list; the order depends on shapes alone.

    Args:
        found: float32 in shared memory. The list of the warpgroup's warp w is `found[first + w * room:][:room]`.
            Values beyond its capacity are counted and dropped.
        first: index of the first warp's list.
        counts: int32, same shape as `numbers`; every element of a warp holds the length of the warp's list.
        numbers: the values, float32, without NaN.
        low: float32.
        high: float32.
        room: capacity of each warp's list.
        layout: register layout of counts and numbers.
        interpret: whether the interpreter runs this.

    Returns:
        The new counts.
    """
    if interpret:
        numbers = numbers.reshape(-1)
        is_kept = (numbers >= low) & (numbers < high)
        place = counts.reshape(-1)[0] + jnp.cumsum(is_kept, dtype=jnp.int32) - 1
        place = jnp.where(is_kept, place, WARPS * room)
        own = pl.ds(first, WARPS * room)
        found[own] = found[own].at[place].set(numbers, mode="drop")
        return counts + jnp.sum(is_kept, dtype=jnp.int32)
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), scalar, layout, layout, scalar, scalar)
    result = plgpu.ShapeDtypeStruct(counts.shape, jnp.dtype(jnp.int32), layout=layout)

    @inline(arg_types=types, return_type=result)
    def run(
        _: Value,
        target: Value,
        first: Value,
        counts: Value,
        numbers: Value,
        low: Value,
        high: Value,
    ) -> Value:
        begin = arith.addi(first.registers.item(), arith.muli(own_warp(), constant(room)))
        start = utils.getelementptr(utils.memref_ptr(target), [begin], i32())
        start = llvm.ptrtoint(i32(), start)
        bounds = [low.registers.item(), high.registers.item()]
        count = elements(counts)[0]
        for number in elements(numbers):
            arguments = [number, *bounds, start, count, constant(room)]
            count = llvm.inline_asm(
                i32(), arguments, _APPEND, "=r,f,f,f,r,r,r,~{memory}", has_side_effects=True
            )
        return _filled(counts, count)

    return run(found, first, counts, numbers, low, high)


def place_chosen(
    places: Ref,
    numbers: Array,
    positions: Array,
    bound: Array,
    ties: Array,
    before: tuple[Array, Array],
    *,
    layout: Layout,
) -> tuple[Array, Array]:
    """Compacts the positions of all values above a bound and of the first `ties` values equal to it.

    The i-th selected position goes to `places[i]`. Each warp holds one row of `numbers`, four adjacent values per
    thread. NaN is never selected. The interpreter cannot run this function.

    Args:
        places: the output, int32 in shared memory.
        numbers: the values, float32.
        positions: int32, same shape.
        bound: float32 scalar.
        ties: number of values equal to the bound that are selected.
        before: (greater, equal), each int32 of the same shape and uniform in a warp: number of values above and equal
            to the bound that precede the warp's row.
        layout: register layout of all these arrays.

    Returns:
        `before` for the values that follow.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), layout, layout, scalar, scalar, layout, layout)
    result = plgpu.ShapeDtypeStruct(numbers.shape, jnp.dtype(jnp.int32), layout=layout)

    @inline(arg_types=types, return_type=(result, result))
    def run(
        _: Value,
        target: Value,
        numbers: Value,
        positions: Value,
        bound: Value,
        ties: Value,
        above: Value,
        equal: Value,
    ) -> tuple[Value, Value]:
        start = llvm.ptrtoint(i32(), utils.memref_ptr(target))
        bound, ties = bound.registers.item(), ties.registers.item()
        counts = [elements(above)[0], elements(equal)[0]]
        numbers_, positions_ = elements(numbers), elements(positions)
        signs = [
            [arith.cmpf(sign, number, bound) for number in numbers_]
            for sign in (arith.CmpFPredicate.OGT, arith.CmpFPredicate.OEQ)
        ]
        lanes = [_below_and_all(bits) for bits in signs]
        now = [arith.addi(count, below) for count, (below, _) in zip(counts, lanes, strict=True)]
        for place, position in enumerate(positions_):
            is_above, is_equal = (bits[place] for bits in signs)
            is_early = arith.cmpi(arith.CmpIPredicate.slt, now[1], ties)
            is_chosen = arith.ori(is_above, arith.andi(is_equal, is_early))
            at = arith.addi(now[0], arith.minsi(now[1], ties))
            arguments = [start, at, position, _number(is_chosen)]
            llvm.inline_asm(None, arguments, _STORE, "r,r,r,r,~{memory}", has_side_effects=True)
            now = [
                arith.addi(count, _number(bits[place]))
                for count, bits in zip(now, signs, strict=True)
            ]
        totals = [arith.addi(count, every) for count, (_, every) in zip(counts, lanes, strict=True)]
        return tuple(
            _filled(given, total) for given, total in zip((above, equal), totals, strict=True)
        )

    return run(places, numbers, positions, bound, ties, *before)


def _below_and_all(bits: list[Value]) -> tuple[Value, Value]:
    """Returns the number of set bits in the warp's lower lanes, and in the whole warp."""
    below = every = constant(0)
    for bit in bits:
        pair = llvm.StructType.get_literal([i32(), i32()])
        both = llvm.inline_asm(pair, [_number(bit)], _COUNT, "=r,=r,r", has_side_effects=True)
        below = arith.addi(below, llvm.extractvalue(i32(), both, [0]))
        every = arith.addi(every, llvm.extractvalue(i32(), both, [1]))
    return below, every


def _number(bit: Value) -> Value:
    return arith.extui(i32(), bit)


def _filled(array: Value, number: Value) -> Value:
    registers = array.registers.copy()
    registers[...] = vector.broadcast(registers.flat[0].type, number)
    return mosaic.FragmentedArray(
        _registers=registers, _layout=array.layout, _is_signed=array.is_signed
    )

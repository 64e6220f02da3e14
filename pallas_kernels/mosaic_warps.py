"""What warps of a Mosaic GPU kernel do that Pallas has no words for: sums of a warp, and lists of what was found.

Arrays may have any layout that gives each thread whole vectors. Knows no op. The interpreter, which takes neither,
gets the plain way: there a warpgroup's first warp does all, so that whoever reads must not care which warp did.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jaxlib.mlir.dialects import arith, llvm, memref, vector

Ref = Any
# MLIR's values have types that are private to JAX.
Value = Any
_arith: Any = arith
_llvm: Any = llvm
_memref: Any = memref
_vector: Any = vector
_utils: Any = mosaic_utils
_inline: Any = plgpu.inline_mgpu
_ir: Any = _utils.ir

WARPS = 4
"""Warps of a warpgroup."""

# $0 and $5 are the count after and before; the rest are the number, the bounds [low, high), the list and its room.
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

# Of the bits that lanes give, how many are set in lanes below and in all.
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

# The table, the place in it, the number, and whether to store it.
_STORE = """{
    .reg .pred is_chosen;
    .reg .b32 at;
    setp.ne.b32 is_chosen, $3, 0;
    mad.lo.u32 at, $1, 4, $0;
    @is_chosen st.shared.b32 [at], $2;
}"""


def store_warp_sums(
    table: Ref,
    first: Array,
    column: int,
    array: Array,
    *,
    layout: Any,  # noqa: ANN401 - private to JAX
    interpret: bool,
) -> None:
    """Writes each warp's sum to `table[first + warp, column]`; the order of adding depends on shapes alone.

    Args:
        table: in shared memory, of the array's dtype, with one row per warp.
        first: the row of the warpgroup's first warp.
        column: where in the rows.
        array: int32 or float32.
        layout: of the array.
        interpret: whether the interpreter runs this.
    """
    if interpret:
        total = jnp.sum(array, dtype=array.dtype)
        for warp in range(WARPS):
            table[first + warp, column] = total if warp == 0 else jnp.zeros_like(total)
        return
    columns = table.shape[1]

    @_inline(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), layout))
    def run(_: Value, target: Value, first: Value, array: Value) -> None:
        row = _arith.addi(first.registers.item(), _warp())
        place = _arith.addi(_arith.muli(row, _c(columns)), _c(column))
        at = _utils.getelementptr(_utils.memref_ptr(target), [place], _i32())
        _llvm.store(_lanes_sum(_thread_sum(array)), at)

    run(table, first, array)


def sum_of_warps(table: Ref, column: int, *, interpret: bool) -> Array:
    """Returns the sum of a column, which has one number from each of 16 warps, in one order for all threads."""
    if interpret:
        return jnp.sum(table[:, column], dtype=table.dtype)
    rows, columns = table.shape
    dtype = jnp.dtype(table.dtype)
    result = plgpu.ShapeDtypeStruct((), dtype, layout=plgpu.Layout.WG_SPLAT(()))

    @_inline(arg_types=(plgpu.RefType(),), return_type=result)
    def run(_: Value, source: Value) -> Value:
        row = _arith.remui(_utils.thread_idx(), _c(rows))
        place = _arith.addi(_arith.muli(row, _c(columns)), _c(column))
        at = _utils.getelementptr(_utils.memref_ptr(source), [place], _i32())
        is_float = dtype == jnp.float32
        number = _llvm.load(_ir.F32Type.get() if is_float else _i32(), at)
        total = _lanes_sum(number, rows)
        return mosaic.FragmentedArray.splat(total, (), is_signed=None if is_float else True)

    return run(table)


def meet_all(barrier: Ref, *, interpret: bool) -> None:
    """Waits until all threads of the block have come here, and sees what they have stored.

    Half a thousand arrivals at a barrier in shared memory, which the interpreter takes, would come one by one.
    """
    if interpret:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @_inline(arg_types=())
    def run(_: Value) -> None:
        _llvm.inline_asm(None, [], "bar.sync 0;", "~{memory}", has_side_effects=True)

    run()


def append(
    found: Ref,
    first: Array,
    counts: Array,
    numbers: Array,
    low: Array,
    high: Array,
    *,
    room: int,
    layout: Any,  # noqa: ANN401 - private to JAX
    interpret: bool,
) -> Array:
    """Appends what lies in [low, high) to the list of the warp that holds it; the order depends on shapes alone.

    Args:
        found: float32 in shared memory; warp w of the warpgroup has `room` places from `first + w * room` on. What
            finds no place is counted and dropped.
        first: place of the first warp's list.
        counts: int32 of the numbers' shape; each says how long the list of its warp is.
        numbers: float32, none of them NaN.
        low: float32.
        high: float32.
        room: places per warp.
        layout: of counts and numbers.
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
    result = plgpu.ShapeDtypeStruct(counts.shape, jnp.int32, layout=layout)

    @_inline(arg_types=types, return_type=result)
    def run(
        _: Value,
        target: Value,
        first: Value,
        counts: Value,
        numbers: Value,
        low: Value,
        high: Value,
    ) -> Value:
        i32 = _i32()
        begin = _arith.addi(first.registers.item(), _arith.muli(_warp(), _c(room)))
        start = _utils.getelementptr(_utils.memref_ptr(target), [begin], i32)
        start = _llvm.ptrtoint(i32, start)
        bounds = [low.registers.item(), high.registers.item()]
        count = _elements(counts)[0]
        for number in _elements(numbers):
            arguments = [number, *bounds, start, count, _c(room)]
            count = _llvm.inline_asm(
                i32, arguments, _APPEND, "=r,f,f,f,r,r,r,~{memory}", has_side_effects=True
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
    layout: Any,  # noqa: ANN401 - private to JAX
) -> tuple[Array, Array]:
    """Writes the positions of numbers above a bound, and of the first `ties` that equal it, each to its place.

    The i-th chosen position goes to `places[i]`. Each warp has one row of the numbers, four neighbours per thread.
    What is NaN is not chosen. There is no way for the interpreter.

    Args:
        places: int32 in shared memory.
        numbers: float32.
        positions: int32 of the same shape.
        bound: what is compared with.
        ties: how many of the numbers that equal the bound are chosen.
        before: of the numbers' shape, the same in all of a warp: how many greater and equal numbers precede the row.
        layout: of all these arrays.

    Returns:
        `before`, for the numbers that follow.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), layout, layout, scalar, scalar, layout, layout)
    result = plgpu.ShapeDtypeStruct(numbers.shape, jnp.int32, layout=layout)

    @_inline(arg_types=types, return_type=(result, result))
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
        start = _llvm.ptrtoint(_i32(), _utils.memref_ptr(target))
        bound, ties = bound.registers.item(), ties.registers.item()
        counts = [_elements(above)[0], _elements(equal)[0]]
        numbers_, positions_ = _elements(numbers), _elements(positions)
        signs = [
            [_arith.cmpf(sign, number, bound) for number in numbers_]
            for sign in (_arith.CmpFPredicate.OGT, _arith.CmpFPredicate.OEQ)
        ]
        lanes = [_below_and_all(bits) for bits in signs]
        now = [_arith.addi(count, below) for count, (below, _) in zip(counts, lanes, strict=True)]
        for place, position in enumerate(positions_):
            is_above, is_equal = (bits[place] for bits in signs)
            is_early = _arith.cmpi(_arith.CmpIPredicate.slt, now[1], ties)
            is_chosen = _arith.ori(is_above, _arith.andi(is_equal, is_early))
            at = _arith.addi(now[0], _arith.minsi(now[1], ties))
            arguments = [start, at, position, _number(is_chosen)]
            _llvm.inline_asm(None, arguments, _STORE, "r,r,r,r,~{memory}", has_side_effects=True)
            now = [
                _arith.addi(count, _number(bits[place]))
                for count, bits in zip(now, signs, strict=True)
            ]
        totals = [
            _arith.addi(count, every) for count, (_, every) in zip(counts, lanes, strict=True)
        ]
        return tuple(
            _filled(given, total) for given, total in zip((above, equal), totals, strict=True)
        )

    return run(places, numbers, positions, bound, ties, *before)


def sums_before(
    table: Ref,
    first: Array,
    column: int,
    shape: tuple[int, ...],
    *,
    layout: Any,  # noqa: ANN401 - private to JAX
) -> Array:
    """Returns, the same for all of a warp, what the warps before it have stored (`store_warp_sums`)."""
    rows, columns = table.shape
    result = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout)

    @_inline(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=result)
    def run(_: Value, source: Value, first: Value) -> Value:
        i32 = _i32()
        own = _arith.addi(first.registers.item(), _warp())
        start = _utils.memref_ptr(source)
        total = _c(0)
        for row in range(rows):
            number = _llvm.load(i32, _utils.getelementptr(start, [_c(row * columns + column)], i32))
            is_before = _arith.cmpi(_arith.CmpIPredicate.slt, _c(row), own)
            total = _arith.addi(total, _arith.select(is_before, number, _c(0)))
        registers_shape = layout.to_mgpu().registers_shape(shape)
        width = layout.to_mgpu().vector_length
        registers = np.empty(registers_shape, dtype=object)
        registers[...] = _vector.broadcast(_ir.VectorType.get((width,), i32), total)
        return mosaic.FragmentedArray(
            _registers=registers, _layout=layout.to_mgpu(), _is_signed=True
        )

    return run(table, first)


def gather(table: Ref, row: Array, columns: Array, *, layout: Any, interpret: bool) -> Array:  # noqa: ANN401 - private to JAX
    """Returns `table[row, columns]` from global memory; nothing is checked.

    Args:
        table: int32.
        row: one for all.
        columns: int32 of any shape.
        layout: of columns.
        interpret: whether the interpreter runs this.
    """
    if interpret:
        return table[row, :][columns]
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct(columns.shape, jnp.int32, layout=layout)

    @_inline(arg_types=(plgpu.RefType(), scalar, layout), return_type=result)
    def run(_: Value, source: Value, row: Value, columns: Value) -> Value:
        index = _ir.IndexType.get()
        row = _arith.index_cast(index, row.registers.item())
        registers = columns.registers.copy()
        for place in np.ndindex(registers.shape):
            register = registers[place]
            kind = _ir.VectorType(register.type)
            numbers = [
                _memref.load(
                    source,
                    [row, _arith.index_cast(index, _vector.extract(register, [], [element]))],
                )
                for element in range(kind.shape[0])
            ]
            registers[place] = _vector.from_elements(kind, numbers)
        return mosaic.FragmentedArray(
            _registers=registers, _layout=columns.layout, _is_signed=columns.is_signed
        )

    return run(table, row, columns)


def load_floats(octets: Ref, size: int, *, layout: Any, interpret: bool) -> Array:  # noqa: ANN401 - private to JAX
    """Returns the float32 numbers whose bytes lie in shared memory.

    Args:
        octets: uint8, four times as many.
        size: how many numbers.
        layout: of the result, `Layout.WGMMA.reduce(1)`: one number per row.
        interpret: whether the interpreter runs this.
    """
    if interpret:
        return lax.bitcast_convert_type(octets[...].reshape(size, 4), jnp.float32)
    result = plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=layout)

    @_inline(arg_types=(plgpu.RefType(),), return_type=result)
    def run(_: Value, source: Value) -> Value:
        start, of = _utils.memref_ptr(source), layout.to_mgpu()
        registers = np.empty(of.registers_shape((size,)), dtype=object)
        f32 = _ir.F32Type.get()
        for place, (row,) in zip(np.ndindex(registers.shape), of.thread_idxs((size,)), strict=True):
            at = _utils.getelementptr(start, [_arith.index_cast(_i32(), row)], f32)
            number = _llvm.load(f32, at)
            registers[place] = _vector.broadcast(_ir.VectorType.get((1,), f32), number)
        return mosaic.FragmentedArray(_registers=registers, _layout=of, _is_signed=None)

    return run(octets)


def _below_and_all(bits: list[Value]) -> tuple[Value, Value]:
    """Returns how many of a warp's bits are set in lanes below this one, and in all of them."""
    below = every = _c(0)
    for bit in bits:
        pair = _llvm.StructType.get_literal([_i32(), _i32()])
        both = _llvm.inline_asm(pair, [_number(bit)], _COUNT, "=r,=r,r", has_side_effects=True)
        below = _arith.addi(below, _llvm.extractvalue(_i32(), both, [0]))
        every = _arith.addi(every, _llvm.extractvalue(_i32(), both, [1]))
    return below, every


def _number(bit: Value) -> Value:
    return _arith.extui(_i32(), bit)


def _filled(array: Value, number: Value) -> Value:
    registers = array.registers.copy()
    registers[...] = _vector.broadcast(registers.flat[0].type, number)
    return mosaic.FragmentedArray(
        _registers=registers, _layout=array.layout, _is_signed=array.is_signed
    )


def _elements(array: Value) -> list[Value]:
    """A thread's numbers."""
    numbers = []
    for register in array.registers.flat:
        size = _ir.VectorType(register.type).shape[0]
        numbers += [_vector.extract(register, [], [place]) for place in range(size)]
    return numbers


def _thread_sum(array: Value) -> Value:
    total, *rest = _elements(array)
    for number in rest:
        total = _plus(total, number)
    return total


def _lanes_sum(total: Value, lanes: int = 32) -> Value:
    """Returns the sum over neighbouring lanes; integers of a whole warp take one instruction."""
    if lanes == 32 and not isinstance(total.type, _ir.F32Type):
        return _llvm.inline_asm(
            _i32(), [total], "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", has_side_effects=True
        )
    distance = lanes // 2
    while distance:
        total = _plus(total, _utils.shfl_bfly(total, distance))
        distance //= 2
    return total


def _plus(one: Value, other: Value) -> Value:
    is_float = isinstance(one.type, _ir.F32Type)
    return _arith.addf(one, other) if is_float else _arith.addi(one, other)


def _warp() -> Value:
    """The warp's number in its warpgroup."""
    return _arith.remui(_arith.divui(_utils.thread_idx(), _c(32)), _c(WARPS))


def _c(number: int) -> Value:
    return _utils.c(number, _i32())


def _i32() -> Value:
    return _ir.IntegerType.get_signless(32)

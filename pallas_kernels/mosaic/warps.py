"""Sums over the warps of a Mosaic GPU kernel, for which Pallas has no words, and where its warps meet or pause.

Arrays may have any layout that gives each thread whole vectors. Knows no op. The interpreter, which takes neither,
gets the plain way: there a warpgroup's first warp does all, so that whoever reads must not care which warp did.
"""

from collections.abc import Callable

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.mosaic.dialects import (
    Value,
    arith,
    constant,
    elements,
    i32,
    inline,
    ir,
    llvm,
    utils,
    vector,
)
from pallas_kernels.mosaic.private_types import Layout, Ref

WARPS = 4
"""Warps of a warpgroup."""


def store_warp_sums(
    table: Ref,
    first: Array,
    column: int,
    array: Array,
    *,
    layout: Layout,
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

    @inline(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), layout))
    def run(_: Value, target: Value, first: Value, array: Value) -> None:
        row = arith.addi(first.registers.item(), own_warp())
        place = arith.addi(arith.muli(row, constant(columns)), constant(column))
        at = utils.getelementptr(utils.memref_ptr(target), [place], i32())
        llvm.store(_lanes_sum(_thread_sum(array)), at)

    run(table, first, array)


def sum_of_warps(table: Ref, column: int, *, interpret: bool) -> Array:
    """Returns the sum of a column, which has one number from each warp of the block, in one order for all threads."""
    if interpret:
        return jnp.sum(table[:, column], dtype=table.dtype)
    rows, columns = table.shape
    dtype = jnp.dtype(table.dtype)
    result = plgpu.ShapeDtypeStruct((), dtype, layout=plgpu.Layout.WG_SPLAT(()))

    @inline(arg_types=(plgpu.RefType(),), return_type=result)
    def run(_: Value, source: Value) -> Value:
        row = arith.remui(utils.thread_idx(), constant(rows))
        place = arith.addi(arith.muli(row, constant(columns)), constant(column))
        at = utils.getelementptr(utils.memref_ptr(source), [place], i32())
        is_float = dtype == jnp.float32
        number = llvm.load(ir.F32Type.get() if is_float else i32(), at)
        total = _lanes_sum(number, rows)
        return mosaic.FragmentedArray.splat(total, (), is_signed=None if is_float else True)

    return run(table)


def sums_before(
    table: Ref,
    first: Array,
    column: int,
    shape: tuple[int, ...],
    *,
    layout: Layout,
) -> Array:
    """Returns, the same for all of a warp, what the warps before it have stored (`store_warp_sums`)."""
    rows, columns = table.shape
    result = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout)

    @inline(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=result)
    def run(_: Value, source: Value, first: Value) -> Value:
        own = arith.addi(first.registers.item(), own_warp())
        start = utils.memref_ptr(source)
        total = constant(0)
        for row in range(rows):
            number = llvm.load(
                i32(), utils.getelementptr(start, [constant(row * columns + column)], i32())
            )
            is_before = arith.cmpi(arith.CmpIPredicate.slt, constant(row), own)
            total = arith.addi(total, arith.select(is_before, number, constant(0)))
        registers_shape = layout.to_mgpu().registers_shape(shape)
        width = layout.to_mgpu().vector_length
        registers = np.empty(registers_shape, dtype=object)
        registers[...] = vector.broadcast(ir.VectorType.get((width,), i32()), total)
        return mosaic.FragmentedArray(
            _registers=registers, _layout=layout.to_mgpu(), _is_signed=True
        )

    return run(table, first)


def meet_all(barrier: Ref, *, interpret: bool) -> None:
    """Waits until all threads of the block have come here, and sees what they have stored.

    Half a thousand arrivals at a barrier in shared memory, which the interpreter takes, would come one by one.
    """
    if interpret:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @inline(arg_types=())
    def run(_: Value) -> None:
        llvm.inline_asm(None, [], "bar.sync 0;", "~{memory}", has_side_effects=True)

    run()


def pause(nanoseconds: int, *, interpret: bool) -> None:
    """Lets a warpgroup wait for about so long, at most for twice as long."""
    if interpret:
        return

    @inline(arg_types=())
    def run(_: Value) -> None:
        llvm.inline_asm(None, [], f"nanosleep.u32 {nanoseconds};", "", has_side_effects=True)

    run()


def on_warps(*jobs: Callable[[], None], interpret: bool) -> None:
    """Runs each job on a warp of its own, so that the other warps' issue slots stay free for other warpgroups."""
    if interpret:
        for job in jobs:
            job()
        return

    @plgpu.warp_map
    def _(warp: Array) -> None:
        for number, job in enumerate(jobs):
            pl.when(warp == number)(job)


def own_warp() -> Value:
    """The warp's number in its warpgroup."""
    return arith.remui(arith.divui(utils.thread_idx(), constant(32)), constant(WARPS))


def _thread_sum(array: Value) -> Value:
    total, *rest = elements(array)
    for number in rest:
        total = _plus(total, number)
    return total


def _lanes_sum(total: Value, lanes: int = 32) -> Value:
    """Returns the sum over neighbouring lanes; integers of a whole warp take one instruction."""
    if lanes == 32 and not isinstance(total.type, ir.F32Type):
        return llvm.inline_asm(
            i32(), [total], "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", has_side_effects=True
        )
    distance = lanes // 2
    while distance:
        total = _plus(total, utils.shfl_bfly(total, distance))
        distance //= 2
    return total


def _plus(one: Value, other: Value) -> Value:
    is_float = isinstance(one.type, ir.F32Type)
    return arith.addf(one, other) if is_float else arith.addi(one, other)

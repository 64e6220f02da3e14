"""Reductions across warps through shared memory, a block-wide barrier and per-warp jobs (inline PTX).

Array arguments may have any layout that gives each thread whole vectors. The interpreter knows neither layouts nor
warps: there the whole sum of a warpgroup is stored as its first warp's, so readers must only use sums over all warps.
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
from pallas_kernels.mosaic.jax_versions import assign
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
    """Writes each warp's sum to `table[first + warp, column]`; the order of addition depends on shapes alone.

    Args:
        table: in shared memory, of the array's dtype, one row per warp of the block.
        first: row of the warpgroup's first warp.
        column: column of the table.
        array: int32 or float32.
        layout: register layout of the array.
        interpret: whether the interpreter runs this.
    """
    if interpret:
        total = jnp.sum(array, dtype=array.dtype)
        for warp in range(WARPS):
            assign(table, (first + warp, column), total if warp == 0 else jnp.zeros_like(total))
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
    """Returns the sum of a column of `store_warp_sums`; all threads add in the same order."""
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
    """Returns the sum of what the preceding warps stored (`store_warp_sums`): an exclusive prefix, uniform per warp."""
    rows, columns = table.shape
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32), layout=layout)

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


def sync_block(barrier: Ref, *, interpret: bool) -> None:
    """Waits at a barrier of all threads of the block (`bar.sync 0`); their earlier stores are then visible.

    The interpreter uses `barrier`, an mbarrier. The compiled kernel does not, because its up to 512 arrivals would be
    serialised.
    """
    if interpret:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @inline(arg_types=())
    def run(_: Value) -> None:
        llvm.inline_asm(None, [], "bar.sync 0;", "~{memory}", has_side_effects=True)

    run()


def on_warps(*jobs: Callable[[], None], interpret: bool) -> None:
    """Runs job i on warp i of the warpgroup; idle warps leave their issue slots to other warpgroups."""
    if interpret:
        for job in jobs:
            job()
        return

    @plgpu.warp_map
    def _(warp: Array) -> None:
        for number, job in enumerate(jobs):
            pl.when(warp == number)(job)


def own_warp() -> Value:
    """Returns the warp's index in its warpgroup."""
    return arith.remui(arith.divui(utils.thread_idx(), constant(32)), constant(WARPS))


def _thread_sum(array: Value) -> Value:
    total, *rest = elements(array)
    for number in rest:
        total = _plus(total, number)
    return total


def _lanes_sum(total: Value, lanes: int = 32) -> Value:
    """Returns the sum over groups of `lanes` lanes; a whole warp's integers take one `redux` instruction."""
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

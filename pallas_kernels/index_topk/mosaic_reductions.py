"""Integer reductions across the warps of a block through a table in shared memory, one row per reduction.

Two successive reductions must use different rows: only the block barrier of the next reduction guarantees that all
threads have read a row.
"""

import jax.experimental.mosaic.gpu as mosaic
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
)
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.warps import WARPS, own_warp

_SCALAR = plgpu.Layout.WG_SPLAT(())
_NONE = -(2**31)


def store_reductions(
    table: Ref,
    column: int,
    first: Array,
    array: Array,
    *,
    kind: str,
    layout: Layout,
    interpret: bool,
) -> None:
    """Writes each warp's reduction of an int32 array to `table[column, first + warp]`.

    Args:
        table: int32 in shared memory, one row per reduction, one element per warp.
        column: row of the table.
        first: index of the warpgroup's first warp.
        array: int32.
        kind: "sum", "max", or "same" for an array whose elements are equal in each warp.
        layout: register layout of the array.
        interpret: whether the interpreter runs this.
    """
    if interpret:
        flat = array.reshape(-1)
        total = {"sum": jnp.sum(flat, dtype=jnp.int32), "max": jnp.max(flat), "same": flat[0]}[kind]
        for warp in range(WARPS):
            nothing = jnp.int32(_NONE if kind == "max" else 0)
            assign(table, (column, first + warp), total if warp == 0 else nothing)
        return
    columns = table.shape[1]

    @inline(arg_types=(plgpu.RefType(), _SCALAR, layout))
    def run(_: Value, target: Value, first: Value, array: Value) -> None:
        total, *rest = elements(array)
        if kind != "same":
            for number in rest:
                total = arith.addi(total, number) if kind == "sum" else arith.maxsi(total, number)
            total = _of_lanes(total, kind)
        place = arith.addi(
            arith.addi(first.registers.item(), own_warp()), constant(column * columns)
        )
        llvm.store(total, utils.getelementptr(utils.memref_ptr(target), [place], i32()))

    run(table, first, array)


def reduction_of_warps(
    table: Ref, column: int, *, kind: str, interpret: bool, before: Array | None = None
) -> Array:
    """Returns the reduction over the warps of the block, or over the warps that precede the calling one.

    Args:
        table: as in `store_reductions`.
        column: row of the table.
        kind: "sum" or "max".
        interpret: whether the interpreter runs this; it does not support `before`.
        before: index of this warpgroup's first warp, for the reduction over preceding warps only.
    """
    if interpret:
        return (jnp.sum if kind == "sum" else jnp.max)(table[column, :])
    count = table.shape[1]
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=_SCALAR)
    first = jnp.int32(count) if before is None else before

    @inline(arg_types=(plgpu.RefType(), _SCALAR), return_type=result)
    def run(_: Value, source: Value, first: Value) -> Value:
        lane = arith.remui(utils.thread_idx(), constant(32))
        row = arith.remui(lane, constant(count))
        place = arith.addi(row, constant(column * count))
        number = llvm.load(i32(), utils.getelementptr(utils.memref_ptr(source), [place], i32()))
        end = constant(count)
        if before is not None:
            end = arith.addi(first.registers.item(), own_warp())
        counts = arith.cmpi(arith.CmpIPredicate.slt, lane, end)
        nothing = constant(_NONE if kind == "max" else 0)
        total = _of_lanes(arith.select(counts, number, nothing), kind)
        return mosaic.FragmentedArray.splat(total, (), is_signed=True)

    return run(table, first)


def _of_lanes(number: Value, kind: str) -> Value:
    operation = {"sum": "add", "max": "max"}[kind]
    text = f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;"
    return llvm.inline_asm(i32(), [number], text, "=r,r", has_side_effects=True)

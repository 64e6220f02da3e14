"""Element-wise gathers for Mosaic GPU kernels, as inline MLIR. No function here checks its indices."""

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.mosaic.dialects import (
    Value,
    arith,
    constant,
    i32,
    inline,
    ir,
    llvm,
    memref,
    utils,
    vector,
)
from pallas_kernels.mosaic.private_types import Layout, Ref


def gather(table: Ref, row: Array, columns: Array, *, layout: Layout, interpret: bool) -> Array:
    """Returns `table[row, columns]` from global memory; indices are not checked.

    Args:
        table: int32 of two axes.
        row: scalar.
        columns: int32 of any shape.
        layout: register layout of columns and of the result.
        interpret: whether the interpreter runs this.
    """
    if interpret:
        return table[row, :][columns]
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct(columns.shape, jnp.dtype(jnp.int32), layout=layout)

    @inline(arg_types=(plgpu.RefType(), scalar, layout), return_type=result)
    def run(_: Value, source: Value, row: Value, columns: Value) -> Value:
        index = ir.IndexType.get()
        row = arith.index_cast(index, row.registers.item())
        registers = columns.registers.copy()
        for place in np.ndindex(registers.shape):
            register = registers[place]
            kind = ir.VectorType(register.type)
            numbers = [
                memref.load(
                    source,
                    [row, arith.index_cast(index, vector.extract(register, [], [element]))],
                )
                for element in range(kind.shape[0])
            ]
            registers[place] = vector.from_elements(kind, numbers)
        return mosaic.FragmentedArray(
            _registers=registers, _layout=columns.layout, _is_signed=columns.is_signed
        )

    return run(table, row, columns)


def load_floats(octets: Ref, size: int, *, layout: Layout, interpret: bool) -> Array:
    """Returns the float32 values that bytes in shared memory encode.

    Args:
        octets: uint8 [4 * size] in shared memory.
        size: number of values.
        layout: register layout of the result, `Layout.WGMMA.reduce(1)`: one value per row.
        interpret: whether the interpreter runs this.
    """
    if interpret:
        return lax.bitcast_convert_type(octets[...].reshape(size, 4), jnp.float32)
    result = plgpu.ShapeDtypeStruct((size,), jnp.dtype(jnp.float32), layout=layout)

    @inline(arg_types=(plgpu.RefType(),), return_type=result)
    def run(_: Value, source: Value) -> Value:
        start, of = utils.memref_ptr(source), layout.to_mgpu()
        registers = np.empty(of.registers_shape((size,)), dtype=object)
        f32 = ir.F32Type.get()
        for place, (row,) in zip(np.ndindex(registers.shape), of.thread_idxs((size,)), strict=True):
            at = utils.getelementptr(start, [arith.index_cast(i32(), row)], f32)
            number = llvm.load(f32, at)
            registers[place] = vector.broadcast(ir.VectorType.get((1,), f32), number)
        return mosaic.FragmentedArray(_registers=registers, _layout=of, _is_signed=None)

    return run(octets)


def prefetch(ref: Ref, row: Array, column: Array) -> None:
    """Brings the 128-byte line of `ref[row, column]` in global memory into L1; the index must be in bounds."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @inline(arg_types=(plgpu.RefType(), scalar, scalar))
    def run(_: Value, source: Value, row: Value, column: Value) -> None:
        kind = ir.MemRefType(source.type)
        (strides, _) = kind.get_strides_and_offset()
        place = arith.addi(
            arith.muli(row.registers.item(), constant(strides[0])), column.registers.item()
        )
        at = utils.getelementptr(utils.memref_ptr(source), [place], kind.element_type)
        at = llvm.ptrtoint(ir.IntegerType.get_signless(64), at)
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [at],
            "prefetch.global.L1 [$0];",
            "l",
            has_side_effects=True,
        )

    run(ref, row, column)

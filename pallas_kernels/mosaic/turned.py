"""Loads and stores of transposed matrices in global memory, element by element, as inline MLIR."""

from collections.abc import Iterator

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.mosaic.dialects import Value, arith, inline, ir, memref, utils, vector
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Layout, Ref


def load_turned(ref: Ref, *, layout: Layout, interpret: bool) -> Array:
    """Returns the transpose of a matrix in global memory, in the layout `layout`, an element per load."""
    if interpret:
        return ref[...].T
    shape, dtype = (ref.shape[1], ref.shape[0]), jnp.dtype(ref.dtype)
    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)

    @inline(arg_types=(plgpu.RefType(),), return_type=result)
    def run(_: Value, source: Value) -> Value:
        of = layout.to_mgpu()
        kind = ir.VectorType.get((of.vector_length,), utils.dtype_to_ir_type(dtype))
        registers = np.empty(of.registers_shape(shape), dtype=object)
        for place, indices in zip(np.ndindex(registers.shape), _indices(of, shape), strict=True):
            numbers = [memref.load(source, index) for index in indices]
            registers[place] = vector.from_elements(kind, numbers)
        return mosaic.FragmentedArray(_registers=registers, _layout=of, _is_signed=None)

    return run(ref)


def store_turned(ref: Ref, array: Array, *, layout: Layout, interpret: bool) -> None:
    """Writes the transpose of an array in the layout `layout` to a matrix in global memory, an element per store."""
    if interpret:
        assign(ref, ..., array.T)
        return

    @inline(arg_types=(plgpu.RefType(), layout))
    def run(_: Value, target: Value, array: Value) -> None:
        places = _indices(array.layout, array.shape)
        for register, indices in zip(array.registers.flat, places, strict=True):
            for number, index in enumerate(indices):
                memref.store(vector.extract(register, [], [number]), target, index)

    run(ref, array)


def _indices(layout: Value, shape: tuple[int, int]) -> Iterator[list[list[Value]]]:
    """Yields, for each register of a thread, the indices of its elements in the transpose.

    They are those of the first register plus constants, so that the thread keeps one address.
    """
    row, column = next(iter(layout.thread_idxs(shape)))
    strides = layout.tiling.tile_strides((shape[1], 1))
    index = ir.IndexType.get()

    def plus(place: Value, offset: int) -> Value:
        return arith.addi(place, utils.c(offset, index))

    for tile in np.ndindex(*layout.registers_shape(shape)):
        offset = sum(number * stride for number, stride in zip(tile, strides, strict=False))
        down, right = divmod(int(offset), shape[1])
        numbers = range(layout.vector_length)
        yield [[plus(column, right + number), plus(row, down)] for number in numbers]

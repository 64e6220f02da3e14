"""A vectorised store of adjacent columns to swizzled shared memory, as inline MLIR. It checks no index."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic.dialects import (
    Value,
    arith,
    constant,
    elements,
    inline,
    ir,
    llvm,
    utils,
    vector,
)
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.tiles import untiled_swizzle

_TOGETHER, _BYTES, _ROWS = 4, 16, 8


def store_side_by_side(
    target: Ref, first: Array, columns: list[Array], *, layout: Layout, interpret: bool
) -> None:
    """Writes `columns[c][i]` to `target[i, first + c]`.

    Each thread holds a whole row (one element of each column) and writes it 16 bytes at a time.

    Args:
        target: float32 [rows, 32] in shared memory, swizzled by 128 bytes and not tiled; it starts at a multiple of
            1024 bytes.
        first: index of the first column, a multiple of 4.
        columns: float32 arrays of one axis; their number is a multiple of 4, at most 32 less `first`.
        layout: register layout of each column, one element per thread.
        interpret: whether the interpreter runs this.
    """
    count = len(columns[0])
    if interpret:
        for column, numbers in enumerate(columns):
            assign(target, (slice(0, count), first + column), numbers)
        return
    rows = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)
    scalar = plgpu.Layout.WG_SPLAT(())

    swizzled = plgpu.RefType(untiled_swizzle(128))

    @inline(arg_types=(swizzled, scalar, layout, *[layout] * len(columns)))
    def run(_: Value, target: Value, first: Value, rows: Value, *columns: Value) -> None:
        kind = ir.F32Type.get()
        (row,) = elements(rows)
        # The swizzle moves group g of 16 bytes of row r to g xor (r mod 8).
        turn = arith.remui(row, constant(_ROWS))
        group = arith.divui(first.registers.item(), constant(_TOGETHER))
        origin = arith.muli(row, constant(_ROWS))
        start = utils.memref_ptr(target)
        numbers = [elements(column)[0] for column in columns]
        four = ir.VectorType.get([_TOGETHER], kind)
        for begin in range(0, len(numbers), _TOGETHER):
            own = arith.addi(group, constant(begin // _TOGETHER))
            at = arith.addi(origin, arith.xori(own, turn))
            place = utils.getelementptr(start, [arith.muli(at, constant(_TOGETHER))], kind)
            held = vector.from_elements(four, numbers[begin : begin + _TOGETHER])
            llvm.store(held, place, alignment=_BYTES)

    run(target, first, rows, *columns)

"""A vectorised store of columns that lie side by side, as inline MLIR. It checks no index."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic.dialects import Value, arith, elements, inline, ir, llvm, utils, vector
from pallas_kernels.mosaic.private_types import Layout, Ref

_TOGETHER, _BYTES = 4, 16


def store_side_by_side(
    target: Ref,
    place: tuple[Array | int, ...],
    columns: list[Array],
    *,
    layout: Layout,
    interpret: bool,
) -> None:
    """Writes `columns[c][i]` to `target[p, f + i, r, t + c]` in global memory, where `place` is (p, f, r, t).

    Each thread holds a whole row (one element of each column) and writes it 16 bytes at a time.

    Args:
        target: float32 of four axes; the last has a multiple of 4 elements.
        place: index of the first element; its last component is a multiple of 4.
        columns: float32 arrays of one axis; their number is a multiple of 4.
        layout: register layout of each column, one element per thread.
        interpret: whether the interpreter runs this.
    """
    first, count = place[1], len(columns[0])
    if interpret:
        rows = jnp.stack(columns, axis=1)
        for column in range(len(columns)):
            at = (place[0], slice(first, first + count), place[2], place[3] + column)
            target[at] = rows[:, column]
        return
    _, height, width, length = target.shape
    number = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout) + first
    scalar = plgpu.Layout.WG_SPLAT(())
    start = place[0] * height
    behind = place[2] * length + place[3]

    @inline(arg_types=(plgpu.RefType(), scalar, scalar, layout, *[layout] * len(columns)))
    def run(
        _: Value, target: Value, start: Value, behind: Value, number: Value, *columns: Value
    ) -> None:
        wide, kind = ir.IntegerType.get_signless(64), ir.F32Type.get()
        (own,) = elements(number)
        row = arith.extsi(wide, arith.addi(start.registers.item(), own))
        origin = arith.addi(
            arith.muli(row, utils.c(width * length, wide)),
            arith.extsi(wide, behind.registers.item()),
        )
        numbers = [elements(column)[0] for column in columns]
        four = ir.VectorType.get([_TOGETHER], kind)
        for begin in range(0, len(numbers), _TOGETHER):
            at = arith.addi(origin, utils.c(begin, wide))
            pointer = utils.getelementptr(utils.memref_ptr(target), [at], kind)
            held = vector.from_elements(four, numbers[begin : begin + _TOGETHER])
            llvm.store(held, pointer, alignment=_BYTES)

    run(target, start, behind, number, *columns)

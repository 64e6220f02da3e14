"""Inverses of unit lower triangular matrices in a warpgroup, by substitution in float32, as inline MLIR.

A thread computes one column: its 64 elements are in registers, and a warp shares each read of the matrix. A column is
zero above the diagonal, so the warps of the last 32 columns skip the first 32 steps. The order of sums is fixed.
Products of powers of the matrix would be faster, but lose all digits where keys repeat.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.delta_scan.mosaic_geometry import SIDE
from pallas_kernels.mosaic.dialects import (
    Value,
    arith,
    constant,
    divide,
    inline,
    ir,
    llvm,
    memref,
    scf,
    utils,
    vector,
)
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref

_math: Any = mlir_math
# Steps that half of the warps skip, elements per read, and columns of a warpgroup at a time.
_HALF, _VECTOR, _THREADS = SIDE // 2, 4, 128


def invert(systems: Ref, factors: Ref, out: Ref, *, interpret: bool) -> None:
    """Writes the inverses of matrices, their columns multiplied by factors; all references are to shared memory.

    Args:
        systems: float32 [matrices, 64, 64], the negative transposes of what the matrices have below their diagonals of
            ones. Other elements do not matter.
        factors: float32 [matrices, 64], the factor of each column.
        out: [matrices, 64, 64], rounded to its dtype.
        interpret: whether the interpreter runs this.
    """
    count = systems.shape[0]
    if interpret:
        for number in range(count):
            inverse = _by_steps(systems[number]) * factors[number][None]
            assign(out, number, inverse.astype(out.dtype))
        return

    @inline(arg_types=(plgpu.RefType(),) * 3)
    def run(_: Value, systems: Value, factors: Value, out: Value) -> None:
        _, thread = divide(utils.thread_idx(), _THREADS)
        own, column = divide(thread, SIDE)
        for first in range(0, count, _THREADS // SIDE):
            matrix = arith.addi(own, constant(first))
            work = _Column(systems, factors, out, matrix, column)
            if first + 1 < count:
                work.solve()
                continue
            exists = arith.cmpi(arith.CmpIPredicate.ult, matrix, constant(count))
            with ir.InsertionPoint(scf.IfOp(exists).then_block):
                work.solve()
                scf.yield_([])

    run(systems, factors, out)


def _by_steps(system: Array) -> Array:
    """Returns the inverse, from the negative transpose of the matrix."""

    def eliminate(step: Array, rows: Array) -> Array:
        later = jnp.where(jnp.arange(SIDE) > step, system[step], 0.0)
        return rows + later[:, None] * rows[step][None]

    return lax.fori_loop(0, SIDE, eliminate, jnp.eye(SIDE, dtype=jnp.float32))


class _Column:
    """One thread's column of one inverse."""

    def __init__(
        self, systems: Value, factors: Value, out: Value, matrix: Value, column: Value
    ) -> None:
        self.systems, self.factors, self.out = systems, factors, out
        self.matrix, self.column = matrix, column
        self.kind = ir.F32Type.get()

    def solve(self) -> None:
        """Computes the column and writes it, multiplied by its factor."""
        is_first = arith.cmpi(arith.CmpIPredicate.ult, self.column, constant(_HALF))
        units = [self.unit(row) for row in range(SIDE)]
        branch = scf.IfOp(is_first, [self.kind] * SIDE, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_(self.eliminate(units, range(_HALF)))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(units)
        self.write(self.eliminate(list(branch.results), range(_HALF, SIDE)))

    def unit(self, row: int) -> Value:
        """Returns 1 on the diagonal and 0 elsewhere."""
        is_own = arith.cmpi(arith.CmpIPredicate.eq, self.column, constant(row))
        return arith.select(is_own, utils.c(1.0, self.kind), utils.c(0.0, self.kind))

    def eliminate(self, column: list[Value], steps: range) -> list[Value]:
        """Subtracts the products of each step's element, then known, from all later elements."""
        column = list(column)
        for step in steps:
            for start in range((step + 1) // _VECTOR * _VECTOR, SIDE, _VECTOR):
                held = self.read(step, start)
                for row in range(max(start, step + 1), start + _VECTOR):
                    factor = vector.extract(held, [], [row - start])
                    column[row] = _math.fma(factor, column[step], column[row])
        return column

    def read(self, step: int, row: int) -> Value:
        """Reads what a step's element is multiplied by for adjacent rows."""
        place = arith.addi(
            arith.muli(self.matrix, constant(SIDE * SIDE)), constant(step * SIDE + row)
        )
        at = utils.getelementptr(utils.memref_ptr(self.systems), [place], self.kind)
        return llvm.load(ir.VectorType.get((_VECTOR,), self.kind), at, alignment=4 * _VECTOR)

    def write(self, solved: list[Value]) -> None:
        """Writes the column."""
        index = ir.IndexType.get()
        matrix, column = (arith.index_cast(index, each) for each in (self.matrix, self.column))
        factor = memref.load(self.factors, [matrix, column])
        stored = ir.MemRefType(self.out.type).element_type
        for row, value in enumerate(solved):
            rounded = arith.truncf(stored, arith.mulf(value, factor))
            memref.store(rounded, self.out, [matrix, utils.c(row, index), column])

"""MLIR's dialects, and numbers of 32 bits in them, for what Pallas has no words for in a Mosaic GPU kernel.

Most of it is private to JAX, and so without types. Knows no op.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jaxlib.mlir.dialects import arith as mlir_arith
from jaxlib.mlir.dialects import llvm as mlir_llvm
from jaxlib.mlir.dialects import memref as mlir_memref
from jaxlib.mlir.dialects import scf as mlir_scf
from jaxlib.mlir.dialects import vector as mlir_vector

Value = Any
arith: Any = mlir_arith
llvm: Any = mlir_llvm
memref: Any = mlir_memref
scf: Any = mlir_scf
vector: Any = mlir_vector
utils: Any = mosaic_utils
ir: Any = utils.ir
inline: Any = plgpu.inline_mgpu


def i32() -> Value:
    """Returns the type of all numbers here."""
    return ir.IntegerType.get_signless(32)


def constant(number: int) -> Value:
    """Returns a number that is known when the kernel is compiled."""
    return utils.c(number, i32())


def divide(value: Value, by: int) -> tuple[Value, Value]:
    """Returns the quotient, and what is left."""
    divisor = constant(by)
    return arith.divui(value, divisor), arith.remui(value, divisor)


def times(value: Value, by: int) -> Value:
    """Returns the product."""
    return arith.muli(value, constant(by))


def add(value: Value, other: Value | int) -> Value:
    """Returns the sum."""
    return arith.addi(value, constant(other) if isinstance(other, int) else other)


def elements(array: Value) -> list[Value]:
    """Returns a thread's numbers of an array whose registers are vectors."""
    numbers = []
    for register in array.registers.flat:
        size = ir.VectorType(register.type).shape[0]
        numbers += [vector.extract(register, [], [place]) for place in range(size)]
    return numbers

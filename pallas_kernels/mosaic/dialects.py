"""MLIR dialects and 32-bit integer arithmetic for inline MLIR in Mosaic GPU kernels.

Kernels use inline MLIR where Pallas has no primitive. Most of these modules are private to JAX and have no types.
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
    """Returns the 32-bit integer type, which all integers here have."""
    return ir.IntegerType.get_signless(32)


def constant(number: int) -> Value:
    """Returns a compile-time constant of 32 bits."""
    return utils.c(number, i32())


def divide(value: Value, by: int) -> tuple[Value, Value]:
    """Returns the unsigned quotient and remainder."""
    divisor = constant(by)
    return arith.divui(value, divisor), arith.remui(value, divisor)


def times(value: Value, by: int) -> Value:
    """Returns the product."""
    return arith.muli(value, constant(by))


def add(value: Value, other: Value | int) -> Value:
    """Returns the sum."""
    return arith.addi(value, constant(other) if isinstance(other, int) else other)


def elements(array: Value) -> list[Value]:
    """Returns this thread's elements of an array as scalars."""
    numbers = []
    for register in array.registers.flat:
        size = ir.VectorType(register.type).shape[0]
        numbers += [vector.extract(register, [], [place]) for place in range(size)]
    return numbers

"""Products of 8-bit floats that keep more digits than Hopper's tensor cores would, for which Pallas has no words.

These cores add what they multiply to some 14 bits of the largest number at hand, the sum so far included
(DeepSeek-V3, arXiv:2412.19437, sections 3.3.2 and 3.5.2). A sum that begins anew for each part of the contracted
dimension stays smaller, and so loses less; the parts are added in float32. Knows no op.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mosaic
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.mosaic.gpu import fragmented_array
from jaxlib.mlir.dialects import nvvm as mlir_nvvm

from pallas_kernels.device import ROW_TILE
from pallas_kernels.mosaic.dialects import Value, inline, ir, llvm, utils, vector
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA, swizzled

nvvm: Any = mlir_nvvm
_fragments: Any = fragmented_array

ROWS = 64
"""Rows of the left operand."""

WIDTH = 128
"""Numbers in a row of either operand, which are as many bytes."""

TRANSFORMS = swizzled(WIDTH, jnp.float8_e4m3fn)
"""How both operands lie in shared memory."""

# Numbers of the contracted dimension that one instruction multiplies.
_STEP = 32
# A descriptor has places in units of 16 bytes: where an operand begins, how far its tiles of eight rows are apart, and
# how they are swizzled.
_UNIT_BITS, _STRIDE_BIT, _SWIZZLE_BIT = 4, 32, 62
_ADDRESSES, _SWIZZLED_BY_128 = 2**18, 1
# Whether it adds to a sum or begins anew, the columns, a thread's numbers of the sum, and the operands.
_MULTIPLY = """{{
    .reg .pred adds;
    setp.ne.b32 adds, {adds}, 0;
    wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {{{sums}}}, ${left}, ${right}, adds, 1, 1;
}}"""


def start_product(left: Ref, right: Ref, part: int, parts: int, *, interpret: bool) -> Array:
    """Sends for the product of two operands' equal parts; it must not be looked at before `wait_for`.

    Args:
        left: float8_e4m3fn [64, 128] in shared memory, with `TRANSFORMS`.
        right: the same, [columns, 128]; a multiple of 8 columns.
        part: which part of the 128.
        parts: how many there are; 1, 2 or 4.
        interpret: whether the interpreter runs this.

    Returns:
        float32 [64, columns].
    """
    columns, steps = right.shape[0], WIDTH // _STEP // parts
    if interpret:
        own = slice(part * WIDTH // parts, (part + 1) * WIDTH // parts)
        x, y = (ref[...][:, own].astype(jnp.float32) for ref in (left, right))
        return jnp.dot(x, y.T, precision=lax.Precision.HIGHEST)
    result = plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=WGMMA)

    @inline(arg_types=(plgpu.RefType(TRANSFORMS), plgpu.RefType(TRANSFORMS)), return_type=result)
    def run(_: Value, left: Value, right: Value) -> Value:
        nvvm.wgmma_fence_aligned()
        sums: list[Value] = []
        for step in range(part * steps, (part + 1) * steps):
            operands = [_descriptor(operand, step) for operand in (left, right)]
            sums = _multiply(sums, operands, columns)
        nvvm.wgmma_commit_group_sync_aligned()
        return _in_layout(sums, columns)

    return run(left, right)


def wait_for(*products: Array, interpret: bool) -> tuple[Array, ...]:
    """Returns products once they are there, as whatever was sent for is then."""
    if interpret:
        return products
    result = tuple(
        plgpu.ShapeDtypeStruct(product.shape, product.dtype, layout=WGMMA) for product in products
    )

    @inline(arg_types=(WGMMA,) * len(products), return_type=result)
    def run(_: Value, *products: Value) -> Value:
        nvvm.wgmma_wait_group_sync_aligned(0)
        # Nobody looks at them before that.
        return tuple(_fragments.optimization_barrier(product) for product in products)

    return run(*products)


def _descriptor(operand: Value, step: int) -> Value:
    """Returns where an instruction finds its columns of an operand."""
    i64 = ir.IntegerType.get_signless(64)
    start = llvm.ptrtoint(i64, utils.memref_ptr(operand))
    flags = llvm.IntegerOverflowFlags.none
    start = llvm.add(start, utils.c(step * _STEP, i64), overflow_flags=flags)
    place = llvm.lshr(llvm.and_(start, utils.c(_ADDRESSES - 1, i64)), utils.c(_UNIT_BITS, i64))
    stride = ROW_TILE * WIDTH >> _UNIT_BITS
    fixed = stride << _STRIDE_BIT | _SWIZZLED_BY_128 << _SWIZZLE_BIT
    return llvm.or_(place, utils.c(fixed, i64))


def _multiply(sums: list[Value], operands: list[Value], columns: int) -> list[Value]:
    """Returns a thread's numbers of a product, added to those of `sums` if there are any."""
    f32, count = ir.F32Type.get(), columns // 2
    text = _MULTIPLY.format(
        adds=int(bool(sums)),
        columns=columns,
        sums=", ".join(f"${place}" for place in range(count)),
        left=count + len(sums),
        right=count + len(sums) + 1,
    )
    # What is added to lies where the result does.
    kinds = ",".join(["=f"] * count + [str(place) for place in range(len(sums))] + ["l", "l"])
    struct = llvm.StructType.get_literal([f32] * count)
    found = llvm.inline_asm(struct, [*sums, *operands], text, kinds, has_side_effects=True)
    return [llvm.extractvalue(f32, found, [place]) for place in range(count)]


def _in_layout(numbers: list[Value], columns: int) -> Value:
    """Returns an array of what each thread has, in the order in which an instruction gives it."""
    layout = _fragments.WGMMA_LAYOUT_ACC_32BIT
    kind = ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.array([vector.broadcast(kind, number) for number in numbers], dtype=object)
    registers = registers.reshape(layout.registers_shape((ROWS, columns)))
    array = mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
    return array.to_layout(_fragments.WGMMA_LAYOUT)

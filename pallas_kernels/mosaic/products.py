"""Products of float8 operands with higher accumulation precision than one chain of FP8 wgmma instructions.

Hopper's tensor cores align FP8 products to the largest addend, the running sum included, and keep about 14 bits
(DeepSeek-V3, arXiv:2412.19437, sections 3.3.2 and 3.5.2). Here each part of the contracted dimension has its own
accumulator, which stays smaller and loses less; the caller adds the parts in float32. Pallas's `wgmma` always continues
one accumulator, so the instructions are inline PTX.
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
"""M of the product: rows of the left operand."""

WIDTH = 128
"""K of the product: float8 elements, and so bytes, in a row of either operand."""

TRANSFORMS = swizzled(WIDTH, jnp.float8_e4m3fn)
"""Transforms (tiling and swizzle) of both operands in shared memory."""

# K of one wgmma instruction.
_STEP = 32
# Fields of a wgmma matrix descriptor: the operand's address and the stride between its tiles of eight rows, both in
# units of 16 bytes, and the swizzle mode.
_UNIT_BITS, _STRIDE_BIT, _SWIZZLE_BIT = 4, 32, 62
_ADDRESSES, _SWIZZLED_BY_128 = 2**18, 1
# Format fields: whether to add to the accumulator (0 overwrites it), the columns, the accumulator's registers of this
# thread, and the operands' descriptors.
_MULTIPLY = """{{
    .reg .pred adds;
    setp.ne.b32 adds, {adds}, 0;
    wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3 {{{sums}}}, ${left}, ${right}, adds, 1, 1;
}}"""


def start_product(left: Ref, right: Ref, part: int, parts: int, *, interpret: bool) -> Array:
    """Issues `left @ right.T` over one part of the contracted dimension; the result is valid only after `wait_for`.

    Args:
        left: float8_e4m3fn [64, 128] in shared memory, with `TRANSFORMS`.
        right: float8_e4m3fn [columns, 128], likewise; `columns` is a multiple of 8.
        part: index of the part.
        parts: number of equal parts that the 128 are cut into: 1, 2 or 4.
        interpret: whether the interpreter runs this.

    Returns:
        float32 [64, columns].
    """
    columns, steps = right.shape[0], WIDTH // _STEP // parts
    if interpret:
        own = slice(part * WIDTH // parts, (part + 1) * WIDTH // parts)
        x, y = (ref[...][:, own].astype(jnp.float32) for ref in (left, right))
        return jnp.dot(x, y.T, precision=lax.Precision.HIGHEST)
    result = plgpu.ShapeDtypeStruct((ROWS, columns), jnp.dtype(jnp.float32), layout=WGMMA)

    @inline(arg_types=(plgpu.RefType(TRANSFORMS), plgpu.RefType(TRANSFORMS)), return_type=result)
    def run(_: Value, left: Value, right: Value) -> Value:
        nvvm.wgmma_fence_aligned()
        sums: list[Value] = []
        for step in range(part * steps, (part + 1) * steps):
            operands = [
                descriptor(operand, step * _STEP, ROW_TILE * WIDTH) for operand in (left, right)
            ]
            sums = _multiply(sums, operands, columns)
        nvvm.wgmma_commit_group_sync_aligned()
        return in_layout(sums, columns)

    return run(left, right)


def wait_for(*products: Array, interpret: bool, pending: int = 0) -> tuple[Array, ...]:
    """Waits for issued wgmma groups, but the last `pending`, and returns the products, now valid."""
    if interpret:
        return products
    result = tuple(
        plgpu.ShapeDtypeStruct(product.shape, product.dtype, layout=WGMMA) for product in products
    )

    @inline(arg_types=(WGMMA,) * len(products), return_type=result)
    def run(_: Value, *products: Value) -> Value:
        nvvm.wgmma_wait_group_sync_aligned(pending)
        # The barrier keeps the compiler from moving uses of the registers above the wait.
        return tuple(_fragments.optimization_barrier(product) for product in products)

    return run(*products)


def descriptor(operand: Value, offset: int, tile_bytes: int) -> Value:
    """Returns the matrix descriptor of an operand in shared memory, swizzled by 128 bytes, for one instruction.

    Args:
        operand: the operand, whose tiles are 8 rows of 128 bytes.
        offset: bytes from its start to the first column of the instruction.
        tile_bytes: bytes from a tile to that of the next eight rows.
    """
    i64 = ir.IntegerType.get_signless(64)
    start = llvm.ptrtoint(i64, utils.memref_ptr(operand))
    flags = llvm.IntegerOverflowFlags.none
    start = llvm.add(start, utils.c(offset, i64), overflow_flags=flags)
    place = llvm.lshr(llvm.and_(start, utils.c(_ADDRESSES - 1, i64)), utils.c(_UNIT_BITS, i64))
    fixed = tile_bytes >> _UNIT_BITS << _STRIDE_BIT | _SWIZZLED_BY_128 << _SWIZZLE_BIT
    return llvm.or_(place, utils.c(fixed, i64))


def moved(descriptor: Value, offset: int) -> Value:
    """Returns the descriptor of columns `offset` bytes on; addresses of shared memory never overflow their field."""
    i64 = ir.IntegerType.get_signless(64)
    flags = llvm.IntegerOverflowFlags.none
    return llvm.add(descriptor, utils.c(offset >> _UNIT_BITS, i64), overflow_flags=flags)


def _multiply(sums: list[Value], operands: list[Value], columns: int) -> list[Value]:
    """Issues one wgmma and returns the accumulator's registers; it adds to `sums` unless they are empty."""
    f32, count = ir.F32Type.get(), columns // 2
    text = _MULTIPLY.format(
        adds=int(bool(sums)),
        columns=columns,
        sums=", ".join(f"${place}" for place in range(count)),
        left=count + len(sums),
        right=count + len(sums) + 1,
    )
    # Accumulator inputs are tied to the output registers.
    kinds = ",".join(["=f"] * count + [str(place) for place in range(len(sums))] + ["l", "l"])
    struct = llvm.StructType.get_literal([f32] * count)
    found = llvm.inline_asm(struct, [*sums, *operands], text, kinds, has_side_effects=True)
    return [llvm.extractvalue(f32, found, [place]) for place in range(count)]


def in_layout(numbers: list[Value], columns: int) -> Value:
    """Returns an array of the accumulator's registers, given in the order of the wgmma instruction."""
    layout = _fragments.WGMMA_LAYOUT_ACC_32BIT
    kind = ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.array([vector.broadcast(kind, number) for number in numbers], dtype=object)
    registers = registers.reshape(layout.registers_shape((ROWS, columns)))
    array = mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
    return array.to_layout(_fragments.WGMMA_LAYOUT)


def accumulators(array: Value) -> list[Value]:
    """Returns the registers of an array of sums in the order of the wgmma instruction; undoes `in_layout`."""
    registers = array.to_layout(_fragments.WGMMA_LAYOUT_ACC_32BIT).registers
    return [vector.extract(register, [], [0]) for register in registers.flat]

"""A barrier of all blocks of a running kernel, in global memory. A block that is not at work is waited for forever."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jaxlib.mlir.dialects import llvm

# MLIR's values have types that are private to JAX.
Value = Any
Ref = Any
_inline: Any = plgpu.inline_mgpu
_utils: Any = mosaic_utils
_llvm: Any = llvm
_ir: Any = _utils.ir

# One thread counts its block in and waits until the count is a multiple of the blocks: the counter is never reset, so
# one serves all barriers of all kernels after one another. What was written before the barrier is seen after it, by
# asynchronous copies too.
_MEET = """{
    .reg .pred first, early;
    .reg .b32 count, now;
    fence.proxy.async;
    setp.eq.u32 first, $1, 0;
    bar.sync 0;
    @!first bra met;
    fence.acq_rel.gpu;
    atom.add.acq_rel.gpu.u32 count, [$0], 1;
    div.u32 count, count, $2;
    add.u32 count, count, 1;
    mul.lo.u32 count, count, $2;
wait:
    ld.acquire.gpu.u32 now, [$0];
    sub.s32 now, now, count;
    setp.lt.s32 early, now, 0;
    @early bra wait;
    fence.acq_rel.gpu;
met:
    bar.sync 0;
    fence.proxy.async;
}"""


def meet(counter: Ref, blocks: int) -> None:
    """Waits until all blocks, of one warpgroup each, have come here.

    Args:
        counter: one int32 in global memory, a multiple of `blocks` before and after.
        blocks: of the grid.
    """

    @_inline(arg_types=(plgpu.RefType(),))
    def run(_: Value, target: Value) -> None:
        i32 = _ir.IntegerType.get_signless(32)
        operands = [_utils.memref_ptr(target), _utils.thread_idx(), _utils.c(blocks, i32)]
        _llvm.inline_asm(None, operands, _MEET, "l,r,n,~{memory}", has_side_effects=True)

    run(counter)

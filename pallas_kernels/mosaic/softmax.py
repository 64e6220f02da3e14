"""The softmax of kernels: its base, and the rescale of an accumulator, which a warp skips if all factors are 1."""

from math import e, log2

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array

from pallas_kernels.mosaic.dialects import (
    Value,
    arith,
    constant,
    elements,
    i32,
    inline,
    ir,
    llvm,
    scf,
    utils,
)
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, over_columns

LOG2_E = log2(e)
"""The kernels compute the softmax with exp2: scores are multiplied by log2(e)."""

_ANY = """{
    .reg .pred mine, all;
    setp.ne.u32 mine, $1, 0;
    vote.sync.any.pred all, mine, 0xffffffff;
    selp.u32 $0, 1, 0, all;
}"""


def rescale(tile: Array, decay: Array, *, interpret: bool) -> Array:
    """Returns `tile` with each row multiplied by its factor; skipping factors of 1 changes no bit of the result."""
    if interpret:
        return tile * over_columns(decay, tile.shape[1])
    result = plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=WGMMA)

    @inline(arg_types=(WGMMA, PER_ROW), return_type=result)
    def run(_: Value, tile: Value, decay: Value) -> Value:
        registers = list(tile.registers.flat)
        kinds = [register.type for register in registers]
        branch = scf.IfOp(_is_any_other_than_1(decay), kinds, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            shrunk = tile * decay.broadcast_in_dim(tile.shape, (0,), tile.layout)
            scf.yield_(list(shrunk.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(registers)
        held = tile.registers.copy()
        held.flat = list(branch.results)
        return type(tile)(_registers=held, _layout=tile.layout, _is_signed=tile.is_signed)

    return run(tile, decay)


def _is_any_other_than_1(array: Value) -> Value:
    """Returns whether any element that the warp holds is not 1."""
    changed, one = constant(0), utils.c(1.0, ir.F32Type.get())
    for number in elements(array):
        is_other = arith.cmpf(arith.CmpFPredicate.UNE, number, one)
        changed = arith.ori(changed, arith.extui(i32(), is_other))
    changed = llvm.inline_asm(i32(), [changed], _ANY, "=r,r", has_side_effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, changed, constant(0))

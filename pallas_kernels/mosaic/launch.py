"""Compiler and interpreter parameters that all launches of Mosaic GPU kernels share."""

import jax.experimental.pallas.mosaic_gpu as plgpu

LANE_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)
"""For kernels in lane semantics that place every barrier between warps themselves: Mosaic inserts none."""

_INTERPRETER = plgpu.InterpretGPUParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)


def interpreter(interpret: bool) -> plgpu.InterpretGPUParams | None:
    """Returns the strictest parameters of the interpreter on the CPU, or `None` for the compiled kernel."""
    return _INTERPRETER if interpret else None

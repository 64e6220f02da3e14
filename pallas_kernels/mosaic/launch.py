"""Launch of Mosaic GPU kernels: what all of them share, and how a launch overlaps the previous kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.argument_weights import EARLY
from pallas_kernels.deferred import deferred
from pallas_kernels.mosaic.jax_versions import honours_register_requests, overlaps_launches
from pallas_kernels.mosaic.private_types import Ref

LANE_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)
"""For kernels in lane semantics that place every barrier between warps themselves: Mosaic inserts none."""

INTERPRETER = plgpu.InterpretGPUParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)
"""The strictest parameters of the interpreter on the CPU."""


def mosaic_kernel(
    body: Callable[..., None],
    *,
    interpret: bool,
    early: bool = False,
    **options: Any,  # noqa: ANN401 - those of `plgpu.kernel`
) -> Callable[..., Any]:
    """Returns `plgpu.kernel(body, **options)`, whose blocks start while the previous kernel ends.

    `body` is traced when a program with the kernel is lowered (`deferred`).

    From JAX 0.12 on a kernel is a node of the step's CUDA graph with a programmatic edge from the previous kernel
    (programmatic dependent launch, CUDA C++ Programming Guide). Its blocks take the places of blocks that have ended,
    initialise their barriers and wait; `body` runs once that kernel has ended and its stores are visible. Every kernel
    waits before it lets the next one start, so all earlier kernels have ended too.

    Args:
        body: the kernel.
        interpret: whether Pallas's interpreter runs the kernel on the CPU, with the strictest parameters.
        early: whether `body` starts at once and calls `await_previous` itself. Until then it may read its first operand
            alone, which must be an argument of the program; the name ends with `argument_weights.EARLY`.
        options: those of `plgpu.kernel`.
    """
    if early:
        options["kernel_name"] += EARLY
    if interpret:
        return plgpu.kernel(body, interpret=INTERPRETER, **options)

    launch = _Launch(overlaps_launches(), honours_register_requests())
    return deferred(launch.kernel, body, options)


@dataclass(frozen=True)
class _Launch:
    """How a kernel is launched under this JAX, as `jax_versions` says where the kernel is called."""

    overlaps: bool
    honours_requests: bool

    def kernel(self, body: Callable[..., None], options: Mapping[str, Any]) -> Callable[..., Any]:
        """Returns `plgpu.kernel(body, **options)`, whose blocks wait first unless the name says that `body` does."""
        now = _Launch(overlaps_launches(), honours_register_requests())
        assert now == self, "tests change them around trace and lowering together"

        def overlapping(*refs: Ref, **scratch: Ref) -> None:
            await_previous()
            body(*refs, **scratch)

        waits = self.overlaps and not options["kernel_name"].endswith(EARLY)
        return plgpu.kernel(overlapping if waits else body, **options)


def await_previous(*, interpret: bool = False) -> None:
    """Waits until the previous kernel has ended and its stores are visible, then lets the next one start.

    Under the interpreter there is nothing to wait for.
    """
    if not interpret:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()

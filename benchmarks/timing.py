"""Times device work: chains of calls over rotating inputs, medians with their spread, and the device's ceilings.

It does not know what is timed, nor whether it is right.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

ROTATION_BYTES = 256 * 2**20
"""Inputs are rotated through at least this much memory: several times the 60 MB of an H200's L2."""

_PROFILER_VARIABLES = (
    "CUDA_INJECTION64_PATH",
    "NSYS_PROFILING_SESSION_ID",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR",
)


@dataclass(frozen=True)
class Ceilings:
    """What a device was measured to do at best.

    Attributes:
        read: bytes per second of a pure read.
        stream: bytes per second that a kernel which also computes reads (a matrix-vector product).
        matmul: FLOP per second of a large product, by dtype.
    """

    read: float
    stream: float
    matmul: dict[str, float] = field(default_factory=dict)

    def floor_us(self, num_bytes: int, flops: int, dtype: str) -> float:
        """Returns the least time for this work; a dtype whose products were not measured counts bytes alone."""
        matmul = self.matmul.get(dtype, math.inf)
        return max(num_bytes / self.stream, flops / matmul) * 1e6


# Measured on one H200, 2026-11-20. A row that only reads can pass its floor by up to 6%.
CEILINGS = {
    "NVIDIA H200": Ceilings(
        read=4.57e12, stream=4.3e12, matmul={"bfloat16": 790e12, "float16": 790e12}
    )
}


@dataclass(frozen=True)
class Timing:
    """The time of one call.

    Attributes:
        us: median over the trials.
        spread: slowest minus fastest trial, over the median.
        calls: calls per trial.
        host_bound: the host took longer to send the calls than the device to run them, so that `us` is the
            host's time.
    """

    us: float
    spread: float
    calls: int
    host_bound: bool


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: how often one launch repeats its calls.
        trials: number of measurements that the median is taken of.
        seconds: least duration of a trial.
    """

    rounds: int = 1
    trials: int = 7
    seconds: float = 0.05


def refuse_profilers() -> None:
    """Raises `RuntimeError` under a profiler: XLA runs other programs there (no command buffers) and slower ones."""
    # JAX has no public way to ask.
    from jax._src.profiler import _profile_state

    found = [name for name in _PROFILER_VARIABLES if os.environ.get(name)]
    if _profile_state.profile_session is not None:
        found.append("jax.profiler")
    torch = sys.modules.get("torch")
    if torch is not None and torch.autograd._profiler_enabled():
        found.append("torch.profiler")
    if found:
        raise RuntimeError(
            f"refusing to time under a profiler ({', '.join(found)}): it changes what runs; "
            f"stop it, or profile without timing"
        )


class Chain:
    """One program that makes many calls, so that the host stays out of short measurements.

    Each of `own` is served in order, `rounds` times over. No call is merged with, moved before or run beside
    another.

    Attributes:
        shared: arrays of all calls; donated to each launch and replaced by what comes back.
        calls: calls in one launch.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], tuple[Any, Any]],
        shared: Any,  # noqa: ANN401 - any tree of arrays
        own: Sequence[Any],
        *,
        rounds: int = 1,
    ) -> None:
        """Prepares the program; the first launch compiles it.

        Args:
            function: takes the shared arrays and one call's own; returns the shared arrays, updated in place
                or not, and a result.
            shared: arrays of all calls.
            own: for each call, the arrays that only it reads.
            rounds: how often the calls are repeated.
        """
        self.shared = shared
        self.calls = len(own) * rounds
        self._own = list(own)

        def run(shared: Any, own: list[Any]) -> tuple[Any, list[Any]]:  # noqa: ANN401 - any tree of arrays
            results: list[Any] = []
            for arguments in own * rounds:
                # Keeps XLA from merging calls that read the same arrays.
                shared, arguments, results = lax.optimization_barrier((shared, arguments, results))
                shared, result = function(shared, arguments)
                results = [*results, result]
            return shared, results

        # A CUDA graph would run calls side by side that do not need one another's results.
        on_gpu = jax.default_backend() == "gpu"
        options = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"} if on_gpu else None
        self._run = jax.jit(run, donate_argnums=0, compiler_options=options)

    def launch(self) -> list[Any]:
        """Sends all calls and returns their results without waiting for them."""
        self.shared, results = self._run(self.shared, self._own)
        return results


def time_launches(
    launch: Callable[[], Any],
    *,
    calls: int,
    effort: Effort,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> Timing:
    """Times a launch of `calls` calls, sent back to back and waited for once per trial.

    Args:
        launch: sends the work and returns at once.
        calls: calls in one launch.
        effort: how long to measure.
        wait: blocks until what the last launch returned is there.
    """
    refuse_profilers()
    for _ in range(2):
        wait(launch())
    sending, single = [], []
    for _ in range(3):
        start = time.perf_counter()
        sent = launch()
        sending.append(time.perf_counter() - start)
        wait(sent)
        single.append(time.perf_counter() - start)
    launches = max(1, math.ceil(effort.seconds / min(single)))
    durations = []
    for _ in range(effort.trials):
        start = time.perf_counter()
        for _ in range(launches - 1):
            launch()
        wait(launch())
        durations.append((time.perf_counter() - start) / launches)
    median = statistics.median(durations)
    # A CPU runs the work on the calling thread, so sending it takes as long as the work.
    device_waits = jax.default_backend() != "cpu"
    return Timing(
        us=median / calls * 1e6,
        spread=(max(durations) - min(durations)) / median,
        calls=calls * launches,
        host_bound=device_waits and min(sending) > 0.9 * median,
    )

"""Times device work: chains of calls over rotating inputs, medians with their spread.

It does not know what is timed, nor whether it is right, nor what a device could do at best.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

ROTATION_BYTES = 256 * 2**20
"""Inputs are rotated through at least this much memory: several times the 60 MB of an H200's L2."""

# The loop and all calls are one CUDA graph, which would run calls that do not need one another side by side.
_IN_ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
    "xla_gpu_enable_dynamic_slice_fusion": False,
}

_PROFILER_VARIABLES = (
    "CUDA_INJECTION64_PATH",
    "NSYS_PROFILING_SESSION_ID",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR",
)


@dataclass(frozen=True)
class Timing:
    """The time of one call.

    Attributes:
        us: median over the trials.
        spread: slowest minus fastest trial, over the median.
        calls: calls per trial.
        host_bound: the host took longer to send the calls than the device to run them, so that `us` is the
            host's time; never so in a chain, where sending cancels out.
    """

    us: float
    spread: float
    calls: int
    host_bound: bool


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: how often one launch repeats its calls, for those that cannot find it out as a chain does.
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

    Each of `own` is served in order, `rounds` times over in a loop on the device. No call is merged with, moved before
    or run beside another.

    Attributes:
        shared: arrays of all calls; donated to each launch and replaced by what comes back.
        rounds: how often a launch repeats the calls; may be changed between launches.
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
        self.rounds = rounds
        self._own = list(own)

        def run_round(state: tuple[Any, list[Any]], own: list[Any]) -> tuple[Any, list[Any]]:
            shared, results = state
            for index, arguments in enumerate(own):
                # Keeps XLA from merging calls that read the same arrays, and from moving them out of the loop.
                shared, arguments, results = lax.optimization_barrier((shared, arguments, results))
                shared, result = function(shared, arguments)
                results = [*results[:index], result, *results[index + 1 :]]
            return shared, results

        def run(rounds: Array, shared: Any, own: list[Any]) -> tuple[Any, list[Any]]:  # noqa: ANN401 - any tree
            shapes = [jax.eval_shape(function, shared, arguments)[1] for arguments in own]
            nothing = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
            return lax.fori_loop(
                jnp.int32(0), rounds, lambda _, state: run_round(state, own), (shared, nothing)
            )

        on_gpu = jax.default_backend() == "gpu"
        options = _IN_ONE_GRAPH if on_gpu else None
        self._run: Any = jax.jit(run, donate_argnums=1, compiler_options=options)

    @property
    def calls(self) -> int:
        """Calls in one launch."""
        return len(self._own) * self.rounds

    def compile(self) -> None:
        """Compiles now what the first launch would compile; several chains may do so at once, in threads."""
        self._run = self._run.lower(jnp.int32(self.rounds), self.shared, self._own).compile()

    def launch(self) -> list[Any]:
        """Sends all calls and returns the results of the last round without waiting for them."""
        self.shared, results = self._run(jnp.int32(self.rounds), self.shared, self._own)
        return results


def time_chain(chain: Chain, effort: Effort) -> Timing:
    """Times calls on the device: what two thirds of a long launch take, so that sending and waiting cancel out."""
    refuse_profilers()

    def seconds_of(rounds: int) -> float:
        chain.rounds = rounds
        start = time.perf_counter()
        results = chain.launch()
        # A call that only writes has no result to wait for.
        jax.block_until_ready((chain.shared, results))
        return time.perf_counter() - start

    seconds_of(1)
    rounds = 1
    # Doubling, since the times of two short launches may not tell which is the longer.
    while seconds_of(rounds) < effort.seconds / 4:
        rounds *= 2
    pairs = [(seconds_of(rounds), seconds_of(3 * rounds)) for _ in range(effort.trials)]
    durations = [long - short for short, long in pairs]
    if min(durations) <= 0:
        # Times vary by more than the calls take, as on a busy CPU.
        durations = [long * 2 / 3 for _, long in pairs]
    chain.rounds = rounds
    median = statistics.median(durations)
    return Timing(
        us=median / (2 * chain.calls) * 1e6,
        spread=(max(durations) - min(durations)) / median,
        calls=4 * chain.calls,
        host_bound=False,
    )


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

"""Timing of device work: chains of calls over rotating inputs, medians and spreads.

Results are not checked here; see `op_benchmark.py`.
"""

import functools
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
"""Bytes of inputs that the calls rotate through: several times the 60 MB of an H200's L2 cache."""

# These options put the loop and all calls into one CUDA graph. SERIALIZE keeps independent calls from overlapping.
_IN_ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
    "xla_gpu_enable_dynamic_slice_fusion": False,
}

_WARM_UP_SECONDS = 0.3

_PROFILER_VARIABLES = (
    "CUDA_INJECTION64_PATH",
    "NSYS_PROFILING_SESSION_ID",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR",
)


@dataclass(frozen=True)
class Timing:
    """The time of one call.

    Attributes:
        us: median over the trials, in microseconds.
        spread: slowest minus fastest trial, divided by the median.
        calls: calls per trial.
        host_bound: whether the host took longer to enqueue the calls than the device to run them, so that `us` is
            the host's time. Always `False` for a chain, where the time of a launch cancels out.
    """

    us: float
    spread: float
    calls: int
    host_bound: bool


@dataclass(frozen=True)
class Effort:
    """The length and number of measurements.

    Attributes:
        rounds: how often one launch repeats its calls, for measurements that do not adapt it as `time_chain` does.
        trials: number of measurements for the median.
        seconds: least duration of a trial, in seconds.
    """

    rounds: int = 1
    trials: int = 7
    seconds: float = 0.05


def refuse_profilers() -> None:
    """Raises `RuntimeError` under a profiler: XLA then runs without command buffers, and slower."""
    # JAX has no public API for this, and its versions have two names.
    from jax._src.profiler import _profile_state

    found = [name for name in _PROFILER_VARIABLES if os.environ.get(name)]
    names = ("session", "profile_session")
    if any(getattr(_profile_state, name, None) is not None for name in names):
        found.append("jax.profiler")
    torch = sys.modules.get("torch")
    if torch is not None and torch.autograd._profiler_enabled():
        found.append("torch.profiler")
    if found:
        raise RuntimeError(
            f"refusing to time under a profiler ({', '.join(found)}), which changes what runs; "
            f"stop the profiler, or profile without timing"
        )


class Chain:
    """Many calls as one program, so that short measurements contain no host time.

    The program calls the function on each element of `own` in order, `rounds` times in a loop on the device. Calls are
    neither merged, nor reordered, nor run concurrently.

    Attributes:
        shared: arrays of all calls; donated to each launch and replaced by its result.
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
        """Prepares the program; `compile` or the first launch compiles it.

        Args:
            function: (shared, own) -> (shared, result); it may update the shared arrays.
            shared: arrays of all calls.
            own: per call, the arrays that only this call reads.
            rounds: how often a launch repeats the calls.
        """
        self.shared = shared
        self.rounds = rounds
        self._own = list(own)

        def run_round(state: tuple[Any, list[Any]], own: list[Any]) -> tuple[Any, list[Any]]:
            shared, results = state
            for index, arguments in enumerate(own):
                # The barrier keeps XLA from merging calls on the same arrays and from hoisting them out of the loop.
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
        """Number of calls in one launch."""
        return len(self._own) * self.rounds

    def compile(self) -> None:
        """Compiles the program before the first launch; safe to call for several chains in parallel threads."""
        self._run = self._run.lower(jnp.int32(self.rounds), self.shared, self._own).compile()

    def launch(self) -> list[Any]:
        """Launches the program and returns the last round's results without waiting for them."""
        self.shared, results = self._run(jnp.int32(self.rounds), self.shared, self._own)
        return results


@functools.cache
def _warm_up() -> None:
    """Keeps a GPU busy once per process: its clocks rise under load alone, which doubled times of the first case."""
    if jax.default_backend() != "gpu":
        return
    square = jnp.zeros((4096, 4096), jnp.bfloat16)
    multiply = jax.jit(jnp.matmul)
    stop = time.perf_counter() + _WARM_UP_SECONDS
    while time.perf_counter() < stop:
        jax.block_until_ready(multiply(square, square))


def time_chain(chain: Chain, effort: Effort) -> Timing:
    """Times calls on the device.

    A trial is the difference of a launch of 3n rounds and one of n rounds, so the costs of launching and waiting
    cancel out.
    """
    refuse_profilers()
    _warm_up()

    def seconds_of(rounds: int) -> float:
        chain.rounds = rounds
        start = time.perf_counter()
        results = chain.launch()
        # An op that only updates a pool has no other result to wait for.
        jax.block_until_ready((chain.shared, results))
        return time.perf_counter() - start

    seconds_of(1)
    rounds = 1
    # Double instead of extrapolating: the times of two short launches are dominated by noise.
    while seconds_of(rounds) < effort.seconds / 4:
        rounds *= 2
    pairs = [(seconds_of(rounds), seconds_of(3 * rounds)) for _ in range(effort.trials)]
    durations = [long - short for short, long in pairs]
    if min(durations) <= 0:
        # Times vary by more than the duration of the calls, as on a busy CPU.
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
    """Times launches of `calls` calls that are enqueued back to back, with one wait per trial.

    Args:
        launch: enqueues the work and returns without waiting.
        calls: calls in one launch.
        effort: how long to measure.
        wait: blocks until the results of the last launch are ready.
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
    # On a CPU the calling thread runs the work, so enqueueing takes as long as the work.
    device_waits = jax.default_backend() != "cpu"
    return Timing(
        us=median / calls * 1e6,
        spread=(max(durations) - min(durations)) / median,
        calls=calls * launches,
        host_bound=device_waits and min(sending) > 0.9 * median,
    )

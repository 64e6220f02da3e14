"""The measurements of `jaxkv bench`: throughput, latency at a request rate, and start-up time."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from jaxkv.bench.figures import Figures, Timeline, figures_of
from jaxkv.bench.serving import Served, serve
from jaxkv.bench.workload import Workload, arrivals
from jaxkv.engine.engine import Engine
from jaxkv.engine.first_runs import run_steps
from jaxkv.engine.warm_up import WarmUp, compile_all, declare_served
from jaxkv.memory import without_old_objects
from jaxkv.weights.quantised.weight_forms import weight_forms


@dataclass(frozen=True)
class StartUp:
    """Times of an engine's start-up.

    Attributes:
        import_seconds: time from the start of the command until all modules are imported.
        load_seconds: time to load weights, allocate the cache and start the device.
        warm_up: number and compile time of the programs.
        start_up_seconds: time from the start of the command until the engine is ready for requests.
        first_token_seconds: time from then to the first token of one request.
    """

    import_seconds: float
    load_seconds: float
    warm_up: WarmUp
    start_up_seconds: float
    first_token_seconds: float

    def __str__(self) -> str:
        return (
            f"start-up {self.start_up_seconds:.2f} s: imports {self.import_seconds:.2f} s, weights and cache "
            f"{self.load_seconds:.2f} s, programs {self.warm_up.seconds:.2f} s\n"
            f"{self.warm_up}\n"
            f"first token after another {self.first_token_seconds:.3f} s"
        )


@dataclass(frozen=True)
class Result:
    """The outcome of a measurement, a description of model, device and workload, and the timelines of its requests."""

    about: dict[str, Any]
    outcome: Figures | StartUp
    timelines: Sequence[Timeline] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns description and outcome in one dictionary that JSON can hold."""
        return {**self.about, **asdict(self.outcome)}

    def __str__(self) -> str:
        header = "{model} in {dtype} on {device}, run by {implementation}".format(**self.about)
        if "steps" in self.about:
            header += (
                "; {steps} steps, {compiled_while_serving} programs compiled while serving".format(
                    **self.about
                )
            )
        return f"{header}\n{self.outcome}"


def measure_rates(
    served: Served, workload: Workload, rates: Sequence[float | None], *, progress: bool = False
) -> Iterator[Result]:
    """Warms up, serves the workload at each rate in one engine, and yields the figures of each.

    Each program runs before the first request comes.

    The prompts of each rate are drawn from a seed of their own, so that no rate finds those of another in the prefix
    cache.

    Args:
        served: the model and engine to measure.
        workload: the requests.
        rates: requests per second; `None` sends all at once, which measures throughput.
        progress: show a bar on stderr while programs compile.

    Raises:
        ValueError: the workload does not fit the model or the cache, or a rate is not above 0.
    """
    due = [arrivals(workload.requests, rate, workload.seed) for rate in rates]
    engine = served.build()
    warm(engine, workload, progress=progress)
    programs = engine.runner.programs
    # As the server does. The first run of a program takes longer, over two GPUs some half a second.
    run_steps(engine, [program.spec for program in programs.manifest()])
    for index, rate in enumerate(rates):
        steps, late = engine.steps, programs.compiled_late
        drawn = replace(workload, seed=workload.seed + index)
        requests = drawn.draw(engine.runner.model.vocab_size)
        with without_old_objects():
            timelines = serve(engine, requests, due[index])
        about = _about(served, drawn, engine) | {
            "request_rate": rate,
            "steps": engine.steps - steps,
            "compiled_while_serving": programs.compiled_late - late,
        }
        yield Result(about, figures_of(timelines), timelines)


def measure_startup(
    served: Served, workload: Workload, *, began: float, progress: bool = False
) -> Result:
    """Starts an engine, serves one request, and returns the time of each part.

    Args:
        served: the model and engine to measure.
        workload: the requests that the warm-up compiles programs for.
        began: `time.perf_counter()` when the command started.
        progress: show a bar on stderr while programs compile.

    Raises:
        ValueError: the workload does not fit the model or the cache.
    """
    imported = time.perf_counter()
    engine = served.build()
    built = time.perf_counter()
    warm_up = warm(engine, workload, progress=progress)
    ready = time.perf_counter()
    [timeline] = serve(engine, workload.draw(engine.runner.model.vocab_size)[:1], [0.0])
    outcome = StartUp(
        import_seconds=imported - began,
        load_seconds=built - imported,
        warm_up=warm_up,
        start_up_seconds=ready - began,
        first_token_seconds=timeline.tokens[0],
    )
    return Result(_about(served, workload, engine), outcome)


def warm(
    engine: Engine, workload: Workload, *, progress: bool = False, background: bool = False
) -> WarmUp:
    """Compiles all programs that the workload may need; with `background` most of them in a thread."""
    needed = declare_served(engine, workload.example(), workload.requests)
    return compile_all(engine.runner, needed, progress=progress, background=background)


def _about(served: Served, workload: Workload, engine: Engine) -> dict[str, Any]:
    leaf = jax.tree.leaves(engine.runner.params)[0]
    return {
        "model": served.name,
        "dtype": str(leaf.dtype),
        "weights": " + ".join(weight_forms(engine.runner.params)),
        "device": jax.devices()[0].device_kind,
        "implementation": str(engine.runner.implementation),
        "max_sequences": served.cache.max_sequences,
        "token_budget": served.engine.token_budget,
        "workload": asdict(workload),
    }

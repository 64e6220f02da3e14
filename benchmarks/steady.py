"""`Observed`: an engine with timers; measures steady decode, the parts of its steps, and times to first tokens."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.generate import Setting, decode_bytes
from benchmarks.step_profile import by_kernel, covered, record_events
from benchmarks.stopwatch import queued_seconds, watch_steps
from jaxkv.config.model import ModelConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import FINISHED, RequestState

Row = dict[str, Any]

_SETTLING_TOKENS = 24
"""Generated before anything is timed: enough for an engine that looks how long steps take before it sends several."""


class Observed:
    """An engine under measurement.

    Args:
        engine: the engine, for exclusive use.
        config: the config of its model.
        temperature: of all requests; 0 is greedy.

    Attributes:
        watch: seconds and calls of planning, packing, enqueueing, waiting and collecting (which includes waiting).
        last: the last program run, and its arguments besides parameters and cache.
        kernels: rows of the kernels in a step of the last steady decode; empty without a GPU.
    """

    def __init__(self, engine: Engine, config: ModelConfig, *, temperature: float = 0.0) -> None:
        self.engine, self.config, self._temperature = engine, config, temperature
        self.kernels: list[Row] = []
        self.last: Any = None
        runner = engine.runner
        run = runner.run

        def keep(spec: Any, arrays: Any) -> Any:  # noqa: ANN401 - passed through
            self.last = runner.program(spec), arrays
            return run(spec, arrays)

        runner.run = keep
        self.watch = watch_steps(engine)

    def requests(self, count: int, prompt: int, output: int, seed: int = 0) -> list[Request]:
        """Returns requests of independent random prompts."""
        draw = np.random.default_rng((seed, prompt, count))
        return [self.request(draw, prompt, output) for _ in range(count)]

    def request(
        self, draw: np.random.Generator, prompt: int, output: int, common: tuple[int, ...] = ()
    ) -> Request:
        """Returns a request whose prompt begins with `common`."""
        tokens = draw.integers(0, self.config.vocab_size, prompt - len(common)).tolist()
        params = SamplingParams(temperature=self._temperature, max_tokens=output, ignore_eos=True)
        return Request(prompt=(*common, *tokens), params=params, seed=0, stop_ids=())

    def steady(self, batch: int, prompt: int, steps: int, bandwidth: float) -> Row:
        """Times steps in which all of `batch` sequences generate; no sequence starts or ends.

        Args:
            batch: number of sequences.
            prompt: tokens of each prompt.
            steps: number of timed steps; a quarter as many are profiled after them.
            bandwidth: read bandwidth of the floor, in bytes per second.
        """
        output = steady_tokens(batch, prompt, steps, self.engine.config.token_budget)
        asked = self.requests(batch, prompt, output, batch)
        samples = [self.engine.add([one])[0] for one in asked]
        while any(sample.generated < _SETTLING_TOKENS for sample in samples):
            self.engine.step()
        self.watch.reset()
        start = time.perf_counter()
        made = self._generate(samples[0], steps)
        wall = (time.perf_counter() - start) / made
        launches = self.watch.calls["enqueue"]
        host = {label: seconds / made for label, seconds in self.watch.seconds.items()}
        busy = self._profile(lambda: self._generate(samples[0], steps // 4))
        per_launch = getattr(self.last[0].spec, "steps", 1)
        queued = queued_seconds(self.engine.runner, *self.last) / per_launch
        length = round(statistics.mean(len(sample.tokens) for sample in samples) - 0.75 * steps)
        if any(sample.status == FINISHED for sample in samples):
            raise RuntimeError("a sequence ended while steps were timed; this is no steady decode")
        self.abort_all(samples)
        itemsize = jax.tree.leaves(self.engine.runner.params)[0].dtype.itemsize
        at_middle = Setting(batch, length, 0, 0)
        num_bytes = decode_bytes(self.config, self.engine.runner.params, at_middle, itemsize)
        host["collect"] -= host["wait"]
        return {
            "batch": batch,
            "context": length,
            "program": str(self.last[0].spec),
            "steps_per_launch": made / launches,
            "step_ms": wall * 1e3,
            "queued_ms": queued * 1e3,
            "gpu_busy_ms": busy and busy * 1e3,
            "gpu_idle_percent": busy and 100 * max(0.0, 1 - busy / wall),
            "floor_ms": num_bytes / bandwidth * 1e3,
            "share_of_floor_percent": 100 * num_bytes / bandwidth / wall,
            "tokens_per_second": batch / wall,
            **{f"{label}_ms": seconds * 1e3 for label, seconds in host.items()},
            "other_host_ms": (wall - sum(host.values())) * 1e3,
        }

    def _profile(self, run: Callable[[], int]) -> float | None:
        """Returns the GPU's busy seconds per step of `run`; `None` if the profiler saw no GPU."""
        steps: list[int] = []
        events = record_events(lambda: steps.append(run()))
        busy = covered(events)
        hlo = self.last[0].compiled.as_text() or ""
        self.kernels = by_kernel(events, steps[0], hlo) if busy else []
        return busy / steps[0] or None

    def _generate(self, sample: RequestState, count: int) -> int:
        """Steps until a sequence has at least `count` more tokens, and returns how many it has got."""
        before = sample.generated
        while sample.generated < before + count:
            self.engine.step()
        return sample.generated - before

    def first_tokens(self, requests: Sequence[Request]) -> tuple[float, float, int]:
        """Adds all requests at once and times their first tokens.

        Returns:
            The seconds until the first request has a token, the seconds until all requests have one, and the number of
            cached prompt tokens.
        """
        start, times = time.perf_counter(), []
        samples = [self.engine.add([one])[0] for one in requests]
        waiting = list(samples)
        while waiting:
            self.engine.step()
            still = [sample for sample in waiting if not sample.generated]
            times += [time.perf_counter() - start] * (len(waiting) - len(still))
            waiting = still
        self.abort_all(samples)
        return times[0], times[-1], sum(sample.cached or 0 for sample in samples)

    def abort_all(self, samples: Sequence[RequestState]) -> None:
        """Aborts requests, and steps until no step is in flight."""
        for sample in samples:
            self.engine.abort(sample)
        while self.engine.has_work:
            self.engine.step()


def steady_tokens(batch: int, prompt: int, steps: int, token_budget: int) -> int:
    """Returns the `max_tokens` with which the first request still generates when the last timed step ends."""
    waiting = -(-batch * prompt // max(1, token_budget - batch))
    return waiting + 2 * steps + 64

"""Host time of the engine's steps, with a stand-in for the device that answers at once; it runs on any machine.

    python -m benchmarks.host_steps --rows 1 64 256

Prompts come all at once, as in `benchmarks.server`. "steady" are decode steps in which no request begins or ends,
"burst" all steps from the first prompt to the last token, and "evicting" the same with a full prefix cache, where each
new page evicts one. "frames" is what the engine process adds to make one frame per step. Times are CPU time of the
thread. The stand-in has no launch; what sending a program to a GPU costs is in `benchmarks.engine`.
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import RECORDS, save_record
from benchmarks.stopwatch import Stopwatch
from jaxkv.bench.shapes import SHAPES
from jaxkv.bench.workload import Workload
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.engine import Engine
from jaxkv.models.registry import build_model
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.serve.served_sample import ServedSample, take_news
from jaxkv.serve.wire import StepDone, frame

Row = dict[str, Any]

_PAGE_SIZE = 64
_TOKEN = 7


def build(rows: int, longest: int, bursts: int) -> Engine:
    """Returns an engine without a device: each step of its programs samples the same token for every row.

    Args:
        rows: most sequences that run at once.
        longest: most tokens of a sequence.
        bursts: the cache has pages for so many times `rows` of the longest sequences.
    """
    model = build_model(SHAPES["tiny"])
    params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), jnp.float32))
    wish = CacheConfig(max_sequences=rows, page_size=_PAGE_SIZE)
    layout, budget = plan_cache(
        model, wish, dtype="float32", max_model_len=longest, free_bytes=None
    )
    counts = {
        name: bursts * count if name != "sampling" else count
        for name, count in budget.counts.items()
    }
    runner = ModelRunner(model, params, layout, counts, Programs())
    answers: dict[ProgramSpec, jax.Array] = {}
    [host, *_] = jax.devices("cpu")

    def program(spec: ProgramSpec) -> Callable[..., Any]:
        assert isinstance(spec, StepSpec), "greedy requests without equal prompts need only steps"
        out = answers.get(spec)
        if out is None:
            tokens = np.tile(np.asarray([_TOKEN, 1], np.int32), (spec.rows, 1))
            out = answers[spec] = jax.device_put(tokens, host)
        return lambda params, cache, *packed: (cache, out)

    runner.program, runner.read = program, np.asarray  # pyright: ignore[reportAttributeAccessIssue]
    sequence_runner = SequenceRunner(runner, max_tokens=longest, max_rows=rows)
    return Engine(sequence_runner, None, EngineConfig(steps_per_launch=1))


class Observed:
    """An engine whose parts are timed.

    Args:
        engine: the engine, for exclusive use.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.watch = engine, Stopwatch(time.thread_time)
        pipeline = engine._pipeline
        for owner, method, label in (
            (engine, "step", "step"),
            (engine.scheduler, "plan", "plan"),
            (pipeline, "send", "send"),
            (engine.sequence_runner.packer, "pack", "pack"),
            (engine.runner, "run", "run"),
            (pipeline, "receive", "receive"),
            (engine._collector, "collect", "collect"),
            (engine._finisher, "end_all", "finish"),
            (engine.prefix, "reclaim", "evict"),
            (self, "frames", "frames"),
        ):
            self.watch.watch(owner, method, label)
        self._samples: dict[int, list[ServedSample]] = {}

    def frames(self) -> bytes:
        """Returns the frame of the last step, as the engine process sends it."""
        return frame(StepDone(take_news(self._samples)))

    def burst(self, workload: Workload, steady: int) -> tuple[Row, Row]:
        """Serves a workload that comes at once; returns the times per step in steady decode, and in all steps.

        Args:
            workload: the requests; all have prompts and outputs of one length.
            steady: steps of steady decode.
        """
        began = time.thread_time()
        added = [self.engine.add([one])[0] for one in workload.draw(SHAPES["tiny"].vocab_size)]
        self._samples = {number: [ServedSample(one)] for number, one in enumerate(added)}
        whole = {"add_us_per_request": 1e6 * (time.thread_time() - began) / len(added)}
        steps, evicted = self.engine.steps, self._evictions()
        self.watch.reset()
        while not all(one.generated or one.error for one in added):
            self._step()
        before, first = dict(self.watch.seconds), self.engine.steps
        for _ in range(steady):
            self._step()
        made = self.engine.steps - first
        in_steady = {
            label: (seconds - before[label]) / made for label, seconds in self.watch.seconds.items()
        }
        for one in added:
            if one.error is not None:
                raise one.error
        if any(one.reason is not None for one in added):
            raise RuntimeError("a request ended while steps were timed; this is no steady decode")
        while self.engine.has_work:
            self._step()
        steps, evicted = self.engine.steps - steps, self._evictions() - evicted
        in_all = {label: seconds / steps for label, seconds in self.watch.seconds.items()}
        whole |= _row(in_all) | {"steps": steps, "evicted_pages": evicted}
        if evicted:
            whole["evict_us_per_page"] = 1e6 * self.watch.seconds["evict"] / evicted
        return _row(in_steady) | {"steps": made, "evicted_pages": 0}, whole

    def _step(self) -> None:
        self.engine.step()
        self.frames()

    def _evictions(self) -> int:
        assert self.engine.prefix is not None, "the default configuration has a prefix cache"
        return self.engine.prefix.stats.evictions


def _row(seconds: dict[str, float]) -> Row:
    """Returns microseconds of each part without the parts inside it, and of all."""
    rest = dict(seconds)
    rest["step"] -= sum(seconds[part] for part in ("plan", "send", "receive", "collect", "finish"))
    rest["send"] -= seconds["pack"] + seconds["run"]
    rest["plan"] -= seconds["evict"]
    rest["rest"] = rest.pop("step")
    found = {f"{part}_us": 1e6 * value for part, value in rest.items()}
    return {"host_us": sum(found.values()), **found}


def measure(rows: int, prompt: int, output: int, steady: int, repeats: int) -> list[Row]:
    """Returns the best of several measurements of each kind of step.

    Args:
        rows: requests that run at once.
        prompt: tokens of each prompt.
        output: tokens of each output.
        steady: steps of steady decode.
        repeats: bursts with and without evictions; other programs of the machine make some slower.
    """
    found: dict[str, list[Row]] = {"steady": [], "burst": [], "evicting": []}
    seen = Observed(build(rows, prompt + output, repeats))
    # What is made by now stays, as in the engine process.
    gc.collect()
    gc.freeze()
    for seed in range(2 * repeats + 1):
        workload = Workload(
            requests=rows,
            prompt_tokens=(prompt, prompt),
            output_tokens=(output, output),
            seed=seed,
        )
        in_steady, whole = seen.burst(workload, steady)
        evicts = whole["evicted_pages"] > 0
        found["evicting" if evicts else "burst"].append(whole)
        if not evicts:
            found["steady"].append(in_steady)
    gc.unfreeze()
    # The first burst of these began in a cache that was not full.
    found["evicting"] = found["evicting"][1:]
    return [
        {"rows": rows, "steps_of": kind, **min(several, key=lambda row: row["host_us"])}
        for kind, several in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the numbers of rows of the command line, prints each row, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--steady", type=int, default=256, help="steps of steady decode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--record", default="host-steps", help="name of the record")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where the record is written")
    options = parser.parse_args(arguments)
    found: list[Row] = []
    for rows in options.rows:
        made = measure(
            rows, options.prompt_tokens, options.output_tokens, options.steady, options.repeats
        )
        for row in made:
            cells = (f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
            print("  ".join(cells), flush=True)
        found += made
    save_record(options.record, found, folder=options.folder)


if __name__ == "__main__":
    main()

"""Runs compiled steps before the first request, since the first runs of a program take longer than later ones.

A GPU loads a program's kernels at its first run, and XLA records and instantiates its CUDA graph. A burst of requests
meets a dozen programs at once, and would wait for each of them.
"""

from collections.abc import Sequence
from contextlib import suppress

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.errors import OutOfPages, OutOfStates
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row, StepRows
from jaxkv.runner.sample_spec import SampleSpec

_RUNS = 3
"""XLA may run a program without its CUDA graph at first, and looks at several runs before it keeps addresses."""


class FirstRuns:
    """Runs those programs of an engine that it has not run, one at a time, while no request waits for it.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ran: set[ProgramSpec] = set()

    def run_all(self) -> None:
        """Runs all programs that are compiled.

        Raises:
            OutOfPages, OutOfStates: as for `run_steps`.
        """
        specs = self._specs()
        run_steps(self._engine, specs)
        self._ran.update(specs)

    def run_next(self) -> bool:
        """Runs one program, unless a thread still compiles some; returns whether it ran one.

        A program is left out if other users of the cache leave no room for a row.
        """
        if self._engine.asleep or self._engine.runner.programs.pending:
            return False
        specs = self._specs()
        spec = next((one for one in specs if one not in self._ran), None)
        if spec is None:
            return False
        self._ran.add(spec)
        if not isinstance(spec, StepSpec | SampleSpec):
            return True
        # What samples runs behind a step.
        steps = [one for one in specs if isinstance(spec, SampleSpec) and _fits(one, spec)][:1]
        with suppress(OutOfPages, OutOfStates):
            run_steps(self._engine, [*steps, spec])
        return True

    def _specs(self) -> list[ProgramSpec]:
        return [program.spec for program in self._engine.runner.programs.manifest()]


def run_steps(engine: Engine, specs: Sequence[ProgramSpec]) -> int:
    """Runs step programs a few times each with one row of one token; returns their number.

    The row has pages of its own, which are free again at the end. Compile all programs first: another one that is
    compiled makes XLA drop the CUDA graphs.

    Args:
        engine: without requests.
        specs: of compiled programs; other programs than steps are left out.

    Raises:
        OutOfPages, OutOfStates: other users of the cache leave no room for the row.
    """
    steps = [spec for spec in specs if isinstance(spec, StepSpec)]
    samplers = [spec for spec in specs if isinstance(spec, SampleSpec)]
    for spec in steps:
        for _ in range(_RUNS):
            _run(engine, spec)
    for sampler in samplers:
        first = next(one for one in steps if _fits(one, sampler))
        for _ in range(_RUNS):
            _run(engine, first, sampler)
    return len(steps) + len(samplers)


def _fits(spec: ProgramSpec, sampler: SampleSpec) -> bool:
    """Returns whether a program computes the hidden states that another one samples from."""
    return isinstance(spec, StepSpec) and spec.forward_only and spec.rows == sampler.rows


def _run(engine: Engine, spec: StepSpec, sampler: SampleSpec | None = None) -> None:
    """Runs a program of steps; with `sampler` that one too, on the hidden states of the first."""
    runner = engine.sequence_runner
    with runner.reserved(spec.steps) as sequence:
        rows = StepRows.of([Row(sequence, (0,), 0, SamplingParams(temperature=0.0))])
        if spec.steps > 1:
            rows = rows._replace(left=[spec.steps])
        if sampler is None:
            out = runner.step(spec, rows)
        else:
            _, arrays = runner.forward(spec, sampler, rows)
            out = runner.sample(sampler, arrays, (None,))
        engine.runner.read(out)

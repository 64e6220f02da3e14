"""Runs compiled steps before the first request, since the first runs of a program take longer than later ones.

A GPU loads a program's kernels at its first run, and XLA records and instantiates its CUDA graph. A burst of requests
meets a dozen programs at once, and would wait for each of them.
"""

from collections.abc import Sequence

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row, StepRows
from jaxkv.runner.sample_spec import SampleSpec

_RUNS = 3
"""XLA may run a program without its CUDA graph at first, and looks at several runs before it keeps addresses."""


def run_steps(engine: Engine, specs: Sequence[ProgramSpec]) -> int:
    """Runs step programs a few times each with one row of one token; returns their number.

    The row has pages of its own, which are free again at the end. Compile all programs first: another one that is
    compiled makes XLA drop the CUDA graphs.

    Args:
        engine: without requests.
        specs: of compiled programs; other programs than steps are left out, and those that sample from steps of which
            none is among them.

    Raises:
        OutOfPages, OutOfStates: other users of the cache leave no room for the row.
    """
    steps = [spec for spec in specs if isinstance(spec, StepSpec)]
    samplers = [spec for spec in specs if isinstance(spec, SampleSpec)]
    for spec in steps:
        for _ in range(_RUNS):
            _run(engine, spec)
    forward = {spec.rows: spec for spec in steps if spec.forward_only}
    samplers = [sampler for sampler in samplers if sampler.rows in forward]
    for sampler in samplers:
        for _ in range(_RUNS):
            _run(engine, forward[sampler.rows], sampler)
    return len(steps) + len(samplers)


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

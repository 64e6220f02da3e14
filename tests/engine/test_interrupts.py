"""Ctrl-C at any line of the scheduler and of the engine's loop: no leak, no lost request, the same tokens."""

import gc
import random
from functools import cache
from pathlib import Path
from sys import monitoring
from types import FunctionType

import pytest

import jaxkv
from jaxkv.engine.request_state import FINISHED, WAITING
from tests.engine.engines import assert_idle, engine_for, request_of
from tests.engine.test_scheduler import Serving, truths

TOOL = monitoring.OPTIMIZER_ID
PACKAGE = str(Path(jaxkv.__file__).parent)
LOOP = (
    "engine/collect",
    "engine/request_state",
    "engine/request_queues",
    "engine/finish",
    "engine/parallel_samples",
    "engine/prefix_reuse",
    "engine/engine",
    "runner/model_runner",
    "engine/in_flight",
    "engine/step_pipeline",
    "runner/row_table",
    "runner/packer",
    "engine/oom_backoff",
    "engine/scheduler",
)


class Interrupt:
    """Raises `KeyboardInterrupt` once, before the line of some modules that is the `at`-th to run within `with`."""

    def __init__(self, at, modules):
        self.at, self.seen, self.raised = at, 0, False
        files = {f"{PACKAGE}/{name}.py" for name in modules}
        self.codes = [code for code in loaded_codes() if code.co_filename in files]

    def __enter__(self):
        monitoring.use_tool_id(TOOL, "interrupts")
        monitoring.register_callback(TOOL, monitoring.events.LINE, self.on_line)
        for code in self.codes:
            monitoring.set_local_events(TOOL, code, 0 if self.raised else monitoring.events.LINE)

    def __exit__(self, *_):
        for code in self.codes:
            monitoring.set_local_events(TOOL, code, 0)
        monitoring.free_tool_id(TOOL)

    def on_line(self, code, line):
        self.seen += not self.raised
        if self.seen == self.at and not self.raised:
            self.raised = True
            raise KeyboardInterrupt


@cache
def loaded_codes():
    """Returns the code of every function of the engine, those that the shape checker wraps included."""
    gc.unfreeze()  # The collector knows nothing of what tests/conftest.py has frozen.
    codes = [
        one.__code__
        for one in gc.get_objects()
        if type(one) is FunctionType and one.__code__.co_filename.startswith(PACKAGE)
    ]
    gc.freeze()
    return codes


def serve(interrupt):
    """Serves samples of two prompts with pages for few, interrupted once in a plan, as the engine would go on."""
    serving = Serving(counts={"gqa": 9, "window": 18, "sampling": 5})
    for seed, length in enumerate((1, 4)):
        serving.add([0, 1, 1] * 3 + [seed] * length, 4, samples=3, seed=5 * seed)
    while serving.unfinished:
        plan = serving.scheduler.plan

        def interrupted(plan=plan):
            with interrupt:
                return plan()

        serving.scheduler.plan = interrupted
        try:
            serving.step()
        except KeyboardInterrupt:
            serving.flights.clear()
            serving.scheduler.requeue_all()
            serving.check_books()
            waiting = [*serving.scheduler.waiting]
            waiting += [one for first in waiting for one in first.other_samples]
            assert set(waiting) == set(serving.unfinished)
            assert all(one.status == WAITING for one in waiting)
        finally:
            serving.scheduler.plan = plan
    serving.finish()
    assert [one.tokens for one in serving.sequences] == truths(serving)
    serving.check_idle()
    return interrupt


@pytest.mark.slow
def test_an_interrupted_fork_leaks_nothing_and_loses_nobody():
    """Every line of it: the samples that had not started follow on, those that had are computed again."""
    lines = serve(Interrupt(10**9, ["engine/parallel_samples"])).seen
    assert lines > 40
    for at in range(1, lines + 1):
        assert serve(Interrupt(at, ["engine/parallel_samples"])).raised


@pytest.mark.parametrize("times", [24, pytest.param(120, marks=pytest.mark.slow)])
def test_a_plan_may_be_interrupted_at_any_line(times):
    lines = serve(Interrupt(10**9, ["engine/scheduler", "engine/parallel_samples"])).seen
    draw = random.Random(3)
    for at in sorted(draw.sample(range(1, lines + 1), times)):
        assert serve(Interrupt(at, ["engine/scheduler", "engine/parallel_samples"])).raised


def answers(interrupt):
    """Returns the outputs of the requests that continue after an interrupt, and the engine."""
    engine = engine_for(free_pages=10)
    requests = [request_of([7, at, 3 * at % 61, 9] * 4, max_tokens=5 + at) for at in range(4)]
    made = [engine.add([one])[0] for one in requests]
    made += engine.add([request_of(range(11), seed=seed, temperature=0.9) for seed in range(3)])
    while any(one.status != FINISHED for one in made):
        try:
            with interrupt:
                engine.step()
        except KeyboardInterrupt:
            engine.sequence_runner.allocator.check()
    assert_idle(engine)
    return [(one.token_ids, one.reason) for one in made]


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_a_step_may_be_interrupted_at_any_line_of_the_loop(times):
    """Requests that were not interrupted have the tokens of a calm run."""
    wanted = answers(Interrupt(10**9, LOOP))  # Compiles, which later runs do not.
    calm = Interrupt(10**9, LOOP)
    assert answers(calm) == wanted
    draw = random.Random(8)
    for at in sorted(draw.sample(range(1, calm.seen + 1), times)):
        interrupt = Interrupt(at, LOOP)
        assert answers(interrupt) == wanted, f"line {at} of {calm.seen}"
        assert interrupt.raised

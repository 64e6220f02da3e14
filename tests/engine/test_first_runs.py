"""The first runs of compiled steps, over a device that refuses every wrong page, state and order."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.first_runs import FirstRuns, run_steps
from jaxkv.engine.request import Request
from jaxkv.engine.warm_up import declare_served
from jaxkv.errors import OutOfPages
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.sampling.features import Features
from tests.engine.simulated_engines import KINDS, draw_setting
from tests.engine.simulated_memory import put_caches_on_device
from tests.engine.simulated_play import Play, assert_all_is_free, check_books


@pytest.mark.parametrize("kind", KINDS)
def test_requests_after_the_first_runs_get_the_tokens_of_an_engine_without_them(monkeypatch, kind):
    put_caches_on_device(monkeypatch)
    draw = random.Random(kind)
    setting = replace(draw_setting(draw, kind, fault_rate=0.0, coarse=False), rows=4, steps=4)
    play = Play(draw, setting, 4)
    params = SamplingParams(temperature=0.7, presence_penalty=0.5, logprobs=2, max_tokens=8)
    example = Request(prompt=(1,) * 20, params=params, seed=1, stop_ids=())
    declared = declare_served(play.engine, example, 4)
    steps = [one for one in declared if isinstance(one, StepSpec)]
    play.device.fill_free()
    assert run_steps(play.engine, declared) == len(steps) > 3
    assert all(play.device.asked[one] == 3 for one in steps)
    assert_all_is_free(play.engine)
    check_books(play.engine)
    play.run()


def test_programs_run_one_at_a_time_once_all_are_compiled(monkeypatch):
    put_caches_on_device(monkeypatch)
    draw = random.Random(5)
    setting = draw_setting(draw, "full", fault_rate=0.0, coarse=False, rows=4, steps=1)
    play = Play(draw, setting, 4)
    engine, grammar = play.engine, SamplingParams(temperature=0.0, max_tokens=8)
    example = Request(prompt=(1,) * 20, params=grammar, seed=1, stop_ids=())
    declared = declare_served(engine, example, 4)
    features = Features(grammar=True)
    declared += engine.shapes.declare_all(features, rows=4, new_tokens=80, total_tokens=28)
    made = {spec: SimpleNamespace(spec=spec) for spec in declared}
    programs = SimpleNamespace(pending=0, manifest=lambda: [made[spec] for spec in compiled])
    monkeypatch.setattr(engine.runner, "programs", programs)
    first, rest = declared[: len(declared) // 2], declared[len(declared) // 2 :]
    compiled = list(first)
    runs = FirstRuns(engine)
    play.device.fill_free()
    runs.run_all()
    asked = play.device.asked
    steps = [one for one in declared if isinstance(one, StepSpec | SampleSpec)]
    assert {*asked} == {*first} & {*steps}
    assert not runs.run_next()
    compiled += rest
    programs.pending = 1
    assert not runs.run_next(), "a program that is compiled later would drop its CUDA graph"
    programs.pending, before = 0, asked.total()
    while runs.run_next():
        # What samples runs behind what computes.
        assert asked.total() - before in (0, 3, 9)
        before = asked.total()
    assert {*asked} == {*steps}
    assert all(count >= 3 for count in asked.values())
    assert_all_is_free(engine)


def test_a_program_without_room_for_a_row_and_an_engine_that_sleeps_run_nothing(monkeypatch):
    put_caches_on_device(monkeypatch)
    draw = random.Random(6)
    setting = draw_setting(draw, "full", fault_rate=0.0, coarse=False, rows=4, steps=1)
    play = Play(draw, setting, 4)
    example = Request(prompt=(1,) * 20, params=SamplingParams(), seed=1, stop_ids=())
    [spec, *_] = declare_served(play.engine, example, 4)
    compiled = [SimpleNamespace(spec=spec)]
    programs = SimpleNamespace(pending=0, manifest=lambda: compiled)
    monkeypatch.setattr(play.engine.runner, "programs", programs)
    runs = FirstRuns(play.engine)
    play.engine.asleep = True
    assert not runs.run_next()
    play.engine.asleep = False
    monkeypatch.setattr(play.engine.sequence_runner, "reserved", no_room)
    assert runs.run_next()
    assert not runs.run_next()
    assert not play.device.asked


def no_room(tokens):
    raise OutOfPages("others hold the pages")

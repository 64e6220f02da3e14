"""The first runs of compiled steps, over a device that refuses every wrong page, state and order."""

import random
from dataclasses import replace

import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.first_runs import run_steps
from jaxkv.engine.request import Request
from jaxkv.engine.warm_up import declare_served
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


def test_what_samples_from_a_step_that_is_not_there_is_left_out(monkeypatch):
    put_caches_on_device(monkeypatch)
    draw = random.Random(5)
    setting = draw_setting(draw, "full", fault_rate=0.0, coarse=False, rows=4, steps=1)
    play = Play(draw, setting, 4)
    features = Features(grammar=True)
    declared = play.engine.shapes.declare_all(features, rows=4, new_tokens=80, total_tokens=28)
    samplers = [one for one in declared if isinstance(one, SampleSpec)]
    forward = next(one for one in declared if isinstance(one, StepSpec) and one.forward_only)
    of_it = [one for one in samplers if one.rows == forward.rows]
    assert 0 < len(of_it) < len(samplers)
    play.device.fill_free()
    assert run_steps(play.engine, [*samplers, forward]) == 1 + len(of_it)
    assert run_steps(play.engine, samplers) == 0
    assert_all_is_free(play.engine)

"""A warm-up in the background: a few programs serve all requests until each has its own, with the same tokens."""

import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams
from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.variants import gqa
from jaxkv.engine.request import Request
from jaxkv.engine.warm_up import declare_served, divide
from jaxkv.errors import ProgramRefused
from jaxkv.programs.compile import TRACING_LOCK
from jaxkv.programs.manifest import Programs, compile_count
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.runner.step_shapes import COARSE, FINE, StepShapes
from jaxkv.sampling.features import Features
from tests.engine.engines import engine_for
from tests.engine.simulated_engines import KINDS, draw_setting
from tests.engine.simulated_memory import put_caches_on_device
from tests.engine.simulated_play import Play, assert_all_is_free, check_books
from tests.one_layer import one_layer_model

MOST_PADDED = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
GPU_SIZES = {"max_rows": 256, "max_tokens": 4096, "token_budget": 2048, "whole_prompts": False}


def layout():
    spec = gqa(8, 128, dtype="bfloat16", page_size=16)
    return group_layers([LayerSpec(layer, spec) for layer in range(2)])


@pytest.mark.parametrize(
    ("options", "features", "most_first"),
    [
        ({"grain": COARSE}, Features(), 10),
        ({"grain": COARSE, "shares": True}, Features(draws=True), 10),
        ({"grain": COARSE, "drafts": 4}, Features(), 10),
        ({"grain": COARSE}, Features(grammar=True), 40),
        ({"grain": FINE}, Features(), 14),
        ({"grain": COARSE, "pinned": True}, Features(), 2),
    ],
)
def test_a_few_programs_serve_for_all_with_little_padding(options, features, most_first):
    shapes = StepShapes(layout(), **GPU_SIZES, **options)
    needed = shapes.declare_all(features)
    needed += [replace(one, steps=4) for one in needed if getattr(one, "decode", False)]
    first, later = divide(needed, [])
    assert {*first, *later} == {*needed}
    assert len(first) + len(later) == len({*needed})
    assert len(first) <= most_first
    for spec in later:
        if isinstance(spec, SampleSpec):
            assert any(one.serves(spec) for one in first)
        elif spec.steps == 1 and not spec.drafts:
            able = [one for one in first if one.serves(spec)]
            assert min(one.tokens for one in able) <= MOST_PADDED * spec.tokens
    # Those of several steps, and those that verify drafts, are never needed.
    assert all(isinstance(one, SampleSpec) or one.steps == 1 > one.drafts for one in first)


def test_programs_that_are_compiled_already_serve_too():
    shapes = StepShapes(layout(), **GPU_SIZES, grain=COARSE)
    drawn, greedy = (shapes.declare_all(Features(draws=draws)) for draws in (True, False))
    first, later = divide(drawn, [])
    assert divide(drawn, first) == ([], later)
    assert divide(drawn, drawn) == ([], [])
    none, rest = divide(greedy, first)
    assert none == []
    assert {*rest} == {*greedy}


def test_a_step_in_two_programs_runs_in_one_whose_sampler_this_warm_up_has():
    """With log-probabilities the samplers are others, and the forward programs are the same."""
    shapes = StepShapes(layout(), **GPU_SIZES, grain=COARSE)
    plain, scored = (Features(grammar=True, logprobs=top) for top in (None, 4))
    known, _ = divide(shapes.declare_all(plain), [])
    needed = shapes.declare_all(scored, rows=4, new_tokens=64, total_tokens=128)
    first, _ = divide(needed, known)
    runs = {*first, *(one for one in known if one in needed)}
    samplers = {one.rows for one in runs if isinstance(one, SampleSpec)}
    for spec in needed:
        if isinstance(spec, StepSpec) and spec.forward_only:
            able = [one for one in (*runs, *known) if one.serves(spec)]
            assert min(able, key=lambda one: one.order_of_cost).rows in samplers


@pytest.mark.parametrize(
    ("kind", "drafts"), [*((kind, 0) for kind in KINDS), ("full", 3), ("hybrid", 3)]
)
def test_a_program_that_is_not_there_yet_is_never_asked_for(monkeypatch, kind, drafts):
    put_caches_on_device(monkeypatch)
    draw = random.Random(f"background {kind}")
    sizes = {"rows": 5, "steps": 4, "budget": 40, "page": 8, "drafts": drafts}
    setting = draw_setting(draw, kind, fault_rate=0.0, coarse=False, **sizes)
    play = Play(draw, setting, 20)
    engine, runner = play.engine, play.engine.runner
    rich = SamplingParams(temperature=0.7, top_p=0.9, logprobs=4, min_tokens=1, max_tokens=20)
    rich = replace(rich, presence_penalty=0.5, stop_token_ids=[3])
    example = Request(prompt=(1,) * 40, params=rich, seed=1, stop_ids=(3,))
    first, _ = divide(declare_served(engine, example, 4), [])
    steps = [one for one in first if isinstance(one, StepSpec)]
    runner._known |= dict.fromkeys(first)
    came = set()

    def is_pending(spec):
        if not isinstance(spec, StepSpec) or spec in {*runner._known, *came}:
            return False
        return bool(spec.steps > 1 or spec.drafts or any(one.serves(spec) for one in steps))

    pending, fit, program = set(), runner.fit, runner.program

    def compiled(spec):
        assert not is_pending(spec), f"{spec} is not there yet"
        return program(spec)

    def fitted(spec):
        found = fit(spec)
        if is_pending(spec):
            pending.add(spec)
            # Some come while others are computed.
            if draw.random() < 0.2:
                came.add(spec)
                runner._arrived.append(SimpleNamespace(spec=spec))
        return found

    monkeypatch.setattr(runner, "program", compiled)
    monkeypatch.setattr(runner, "fit", fitted)
    monkeypatch.setattr(runner.programs, "is_pending", is_pending)
    play.device.fill_free()
    play.run()
    assert_all_is_free(engine)
    check_books(engine)
    assert len(pending) > 2
    assert came & {*play.device.asked}, "those that came were used"
    if drafts:
        assert any(spec.drafts for spec in pending)


def test_a_strict_llm_serves_before_and_after_with_the_same_tokens(tmp_path):
    options = {"dtype": "float32", "max_model_len": 64, "progress": False}
    folder = one_layer_model(tmp_path / "one")
    cache = CacheConfig(max_sequences=8, page_size=16)
    prompts = [[5] * 30, [7] * 3, [9, 8, 7, 6, 5], [1, 2] * 9, [3] * 12]
    config = EngineConfig(token_budget=64, steps_per_launch=2)
    with LLM(folder, cache=cache, engine=config, strict=True, **options) as llm:
        with TRACING_LOCK:
            warm = llm.warm_up(batch=8, prompt_tokens=40, sampling=GREEDY, background=True)
            assert warm.pending == llm.stats().programs_pending > warm.programs > 3
            assert f"{warm.pending} more are compiled in the background" in str(warm)
            before, few = compile_count(), llm.stats().programs
            alone = llm.generate(prompts[0], GREEDY)
            together = llm.generate(prompts, GREEDY)
            assert compile_count() == before
            # What was not declared is refused as ever.
            with pytest.raises(ProgramRefused, match="draws"):
                llm.generate(prompts[0], SamplingParams(temperature=1.0, max_tokens=4))
        llm.finish_warm_up()
        assert llm.stats().programs_pending == 0
        assert llm.stats().programs == few + warm.pending
        asked, run = [], llm.engine.sequence_runner.step
        llm.engine.sequence_runner.step = lambda shape, rows: (
            asked.append(shape) or run(shape, rows)
        )
        before = compile_count()
        assert [one.token_ids for one in llm.generate(prompts[0], GREEDY)] == [
            one.token_ids for one in alone
        ]
        again = llm.generate(prompts, GREEDY)
        assert compile_count() == before
        assert [one.token_ids for one in again] == [one.token_ids for one in together]
        assert {shape.steps for shape in asked} == {1, 2}
        assert min(shape.rows for shape in asked if shape.decode) == 1
        assert llm.stats().compiled_late == 0


def test_what_ran_out_of_memory_is_not_run_again_while_a_smaller_program_is_on_its_way(tmp_path):
    cache = CacheConfig(max_sequences=2, page_size=16)
    folder = one_layer_model(tmp_path / "one")
    options = {"dtype": "float32", "max_model_len": 128, "cache": cache, "progress": False}
    with LLM(folder, strict=True, **options) as llm:
        pipeline, backoff = llm.engine._pipeline, llm.engine.oom_backoff
        with TRACING_LOCK:
            llm.warm_up(batch=2, prompt_tokens=60, sampling=GREEDY, background=True)
            [sequence] = llm.engine.add(llm.requests([5] * 10, GREEDY))
            parts = llm.engine.scheduler.plan().parts
            larger = pipeline.shape(parts)
            assert larger.tokens > 16
            backoff.note_failure(larger, MemoryError("no room"), lost=False)
            smaller = pipeline.shape(parts)
            assert smaller.tokens < larger.tokens
            assert llm.engine.runner.programs.is_pending(smaller)
            assert llm.engine.runner.program(smaller).spec == smaller
            llm.engine.abort(sequence)


def test_programs_arrive_while_other_threads_check_requests():
    """Callers of `AsyncLLM` check their requests in threads of their own, beside the one that steps."""
    runner = engine_for(programs=Programs()).runner
    shapes = [StepSpec(tokens, 1, (1,), Features()) for tokens in range(2, 400)]
    ends, failures = threading.Event(), []

    def check():
        try:
            while not ends.is_set():
                runner.fit(shapes[-1])
                runner.has(shapes[0])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=check) for _ in range(3)]
    for thread in threads:
        thread.start()
    for spec in shapes:
        runner._arrived.append(SimpleNamespace(spec=spec))
        runner.fit(spec)
    ends.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(map(runner.has, shapes))


def test_an_llm_that_closes_ends_the_background(tmp_path):
    cache = CacheConfig(max_sequences=2, page_size=16)
    folder = one_layer_model(tmp_path / "one")
    llm = LLM(folder, dtype="float32", max_model_len=64, cache=cache, progress=False)
    with TRACING_LOCK:
        llm.warm_up(batch=2, prompt_tokens=30, sampling=GREEDY, background=True)
        programs = llm.engine.runner.programs
        assert programs.pending > 1
        before, most = compile_count(), programs.pending
    llm.close()
    assert programs.pending == 0
    assert compile_count() - before < most
    runner = llm.engine.runner
    assert not runner._arrived
    assert not runner._known
    with pytest.raises(RuntimeError, match="closed"):
        llm.finish_warm_up()

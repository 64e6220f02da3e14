"""Several decode steps per launch change no token, and end where single steps are needed."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxkv.bench.shapes import HYBRID_SHAPES, SHAPES
from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.variants import gqa, mla, sampling, window
from jaxkv.config.blocks import DeltaConfig, MixtureConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.engine.request_state import FINISHED
from jaxkv.engine.steps import multi_step
from jaxkv.engine.steps.in_flight import InFlightStep
from jaxkv.engine.steps.multi_step import (
    StepsPerLaunch,
    bytes_of_one_row,
    choose_steps,
    declare_multi_steps,
)
from jaxkv.engine.warm_up import declare_served
from jaxkv.models.registry import build_model
from jaxkv.models.tensor_parallel import AXIS, TensorParallel
from jaxkv.programs.audit import GRANULE
from jaxkv.programs.compile import TRACING_LOCK
from jaxkv.programs.manifest import Programs
from jaxkv.runner.program_specs import StepSpec
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import features_for
from jaxkv.weights.quantised.weight_forms import bytes_of_types
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.peer_sum.api import MOST_BYTES
from tests.engine.engines import (
    LONGEST,
    ROWS,
    assert_equal,
    assert_idle,
    engine_for,
    oracle,
    programs_of,
    request_of,
    too_large,
)

SAMPLING = LayerSpec(1, sampling(50, penalties=False, bias_entries=0))
GREEDY = {}
CHOOSY = {
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.3,
    "logit_bias": {3: 1.0, 17: -4.0},
    "logprobs": 2,
}


def requests_of(wish, count=8, seed=5):
    """Draws requests of which some begin alike, and some end with a stop id."""
    draw = random.Random(seed)
    stem, made = [draw.randrange(61) for _ in range(16)], []
    for number in range(count):
        prompt = draw.choice([[], stem]) + [draw.randrange(61) for _ in range(draw.randrange(2, 9))]
        stop_ids = tuple(draw.sample(range(61), 9)) if number % 2 else ()
        most = draw.randrange(9, LONGEST - len(prompt))
        made.append(request_of(prompt, seed=number, stop_ids=stop_ids, max_tokens=most, **wish))
    return made


def watch(engine):
    """Returns a list that grows by the number of steps of each launch."""
    pipeline = engine._pipeline
    sent, send = [], pipeline._run

    def noting(parts, shape):
        sent.append(shape.steps)
        return send(parts, shape)

    pipeline._run = noting
    return sent


def serve(engine, requests, aborts=()):
    """Lets requests come two at a time while others generate, and aborts some in the middle."""
    sequences, waiting, turns = [], list(requests), 0
    while waiting or any(one.status != FINISHED for one in sequences):
        running = sum(one.status != FINISHED for one in sequences)
        if waiting and (running == 0 or (turns % 7 == 0 and running < ROWS - 1)):
            for _ in range(min(2, len(waiting))):
                sequences += engine.add([waiting.pop(0)])
        engine.step()
        turns += 1
        for at in aborts:
            if at < len(sequences) and turns % 5 == 4 and sequences[at].generated:
                engine.abort(sequences[at])
        engine.sequence_runner.allocator.check()
    return sequences


@pytest.mark.parametrize(
    ("steps", "wish", "overlap"),
    [
        # Programs of four steps serve most tests here.
        pytest.param(2, GREEDY, True, marks=pytest.mark.slow),
        (4, GREEDY, True),
        (4, GREEDY, False),
        pytest.param(8, GREEDY, True, marks=pytest.mark.slow),
        pytest.param(4, CHOOSY, True, marks=pytest.mark.slow),
    ],
    ids=["2", "4", "4, in turn", "8", "4, choosy"],
)
def test_tokens_are_those_of_the_oracle_however_many_steps_are_sent_at_once(steps, wish, overlap):
    """Rows stop or reach their limit in the middle of a program; requests arrive and hit prefixes between programs."""
    requests = requests_of(wish)
    engine = engine_for(steps_per_launch=steps, overlap=overlap)
    sent = watch(engine)
    sequences = serve(engine, requests)
    assert_equal(sequences, oracle(requests))
    assert set(sent) == {1, steps}
    assert engine.steps == sum(sent)
    assert {"stop", "length"} == {one.reason for one in sequences}
    assert any(one.cached for one in sequences)
    assert_idle(engine)


def test_a_tight_pool_ends_multi_step_programs_before_a_preemption():
    requests = requests_of(GREEDY, count=5)
    engine = engine_for(steps_per_launch=4, free_pages=9)
    sent = watch(engine)
    assert_equal(serve(engine, requests), oracle(requests))
    assert set(sent) == {1, 4}
    assert_idle(engine)


def test_a_stop_at_any_of_several_steps_ends_the_request_there():
    """What was computed in vain is not handed out, and its keys are not offered to those who begin alike."""
    plain = request_of(range(3, 14), max_tokens=24)
    [whole] = oracle([plain])
    for at in range(4, 12):
        stop = whole.token_ids[at]
        first = whole.token_ids.index(stop)
        engine = engine_for(steps_per_launch=4)
        engine.run(stopped := engine.add([replace(plain, stop_ids=(stop,))]))
        assert tuple(stopped[0].token_ids) == whole.token_ids[: first + 1]
        assert stopped[0].reason == "stop"
        engine.step()
        # A text that begins alike and goes on otherwise.
        longer = request_of([*plain.prompt, *stopped[0].token_ids, 60, 59], max_tokens=6)
        engine.run(after := engine.add([longer]))
        assert after[0].cached
        assert_equal(after, oracle([longer]))
        assert_idle(engine)


def test_an_abort_while_several_steps_are_in_flight_leaves_the_others_alone():
    requests = requests_of(GREEDY)
    wanted = oracle(requests)
    engine = engine_for(steps_per_launch=4)
    gone = [1, 2, 5]
    for at, (sequence, want) in enumerate(
        zip(serve(engine, requests, aborts=gone), wanted, strict=True)
    ):
        if at in gone:
            assert tuple(sequence.token_ids) == want.token_ids[: sequence.generated]
        else:
            assert_equal([sequence], [want])
    assert_idle(engine)


def test_a_request_that_waits_ends_multi_step_programs_until_it_generates():
    engine = engine_for(steps_per_launch=4, prefix_cache=False)
    sent = watch(engine)
    first = engine.add([request_of([1, 2, 3], max_tokens=50)])
    while first[0].generated < 6:
        engine.step()
    assert sent[-1] == 4
    before = len(sent)
    second = engine.add([request_of([4, 5, 6], max_tokens=30)])
    engine.step()
    assert sent[before:] == [1]
    engine.run([*first, *second])
    assert 4 in sent[before:]
    assert_equal(first + second, oracle([one.request for one in first + second]))


def test_more_rows_than_are_sent_several_at_a_time_are_planned_one_step_at_a_time():
    """Planning several steps and sending one of them took the host longer than all else."""
    assert StepsPerLaunch(4, automatic=True, rows=16).most_rows == 16
    assert StepsPerLaunch(4, rows=16).most_rows is None, (
        "a number that was asked for is for any rows"
    )
    engine = engine_for(steps_per_launch=4, prefix_cache=False)
    assert engine.scheduler.most_rows_at_once == ROWS
    engine.scheduler.most_rows_at_once = 1
    planned, plan = set(), engine.scheduler.plan

    def noted():
        made = plan()
        planned.add((len(made.parts), made.steps))
        return made

    engine.scheduler.plan = noted
    served = start_two(engine)
    engine.run(served)
    assert {(2, 1), (1, 4)} <= planned
    assert (2, 4) not in planned
    assert_equal(served, oracle([one.request for one in served]))


def start_two(engine):
    """Requests of which one generates for longer than the other."""
    requests = (request_of([1, 2, 3], max_tokens=9), request_of([4, 5], max_tokens=30))
    return [engine.add([request])[0] for request in requests]


def test_rows_whose_stop_ids_are_blocked_take_one_step_at_a_time():
    engine = engine_for(steps_per_launch=4)
    for least, most in ((0, 4), (5, 1)):
        request = request_of([1, 2, 3], max_tokens=9, min_tokens=least)
        [sequence] = engine.add([request])
        engine.scheduler.dispatched(engine.scheduler.plan().parts)
        plan = engine.scheduler.plan()
        shape = engine.multi_step.shape(plan.parts)
        assert (1 if shape is None else shape.steps) == most
        assert [part.count for part in plan.parts] == [plan.steps] == [4]
        engine.abort(sequence)
    assert_idle(engine)


def test_a_multi_step_program_without_memory_is_not_sent_again_and_costs_no_token(caplog):
    """Single steps, which need less, go on."""
    engine = engine_for(steps_per_launch=4)
    sent, step = watch(engine), engine.sequence_runner.step

    def exhausted(shape, rows):
        if shape.steps > 1:
            raise MemoryError("no room")
        return step(shape, rows)

    engine.sequence_runner.step = exhausted
    request = request_of([1, 2, 3], max_tokens=20)
    engine.run(served := engine.add([request]))
    assert_equal(served, oracle([request]))
    assert sent.count(4) == 2
    assert too_large(caplog)[0].steps == 4
    assert_idle(engine)


def test_a_multi_step_program_that_fails_is_sent_step_by_step_and_costs_no_request(caplog):
    """A program of several steps that cannot run fails none of its requests."""
    engine = engine_for(steps_per_launch=4)
    sent, step = watch(engine), engine.sequence_runner.step

    def broken(shape, rows):
        if shape.steps > 1:
            raise RuntimeError("INTERNAL: no such graph")
        return step(shape, rows)

    engine.sequence_runner.step = broken
    request = request_of([1, 2, 3], max_tokens=20)
    engine.run(served := engine.add([request]))
    assert_equal(served, oracle([request]))
    assert sent.count(4) == 1
    assert too_large(caplog) == []
    assert_idle(engine)


def test_an_engine_that_was_warmed_up_for_several_steps_compiles_none_and_without_them_sends_none():
    request = request_of([1] * 20, max_tokens=20)
    wanted = oracle([request])
    for declared in (True, False):
        programs = Programs(strict=True)
        programs._programs |= programs_of("plain")._programs
        engine = engine_for(programs=programs, steps_per_launch=4, prefix_cache=False)
        needed = declare_served(engine, request, 1)
        assert any(getattr(one, "steps", 1) == 4 for one in needed)
        for one in needed:
            if declared or getattr(one, "steps", 1) == 1:
                engine.runner.program(one)
        programs.seal()
        sent = watch(engine)
        engine.run(served := engine.add([request]))
        assert_equal(served, wanted)
        assert set(sent) == ({1, 4} if declared else {1})
        assert programs.compiled_late == 0


def test_several_steps_are_sent_once_their_program_is_there_and_no_request_waits_for_it():
    request = request_of([1] * 20, max_tokens=20)
    programs = Programs()
    programs._programs |= programs_of("plain")._programs
    engine = engine_for(programs=programs, steps_per_launch=4, prefix_cache=False)
    needed = declare_served(engine, request, 1)
    several = [one for one in needed if getattr(one, "steps", 1) > 1]
    for one in several:
        programs._programs.pop(one, None)
    engine.runner.compile_all([one for one in needed if one not in several])
    sent = watch(engine)
    with TRACING_LOCK:
        engine.runner.compile_in_background(several, lambda program: None)
        engine.run(served := engine.add([request]))
        assert programs.pending == len(several) > 0
    programs.wait()
    assert set(sent) == {1}
    engine.multi_step.chosen = StepsPerLaunch(4, automatic=True)
    single = engine.shapes.choose(1, 1, Features(), total_tokens=20)
    assert engine.multi_step.measures(single)
    with TRACING_LOCK:
        other = replace(single, rows=2, tokens=2, features=Features(draws=True))
        engine.runner.compile_in_background([other], lambda program: None)
        assert not engine.multi_step.measures(single), "the thread slows the host"
    programs.wait()
    engine.multi_step.chosen = StepsPerLaunch(4)
    engine.run(later := engine.add([request]))
    assert set(sent) == {1, 4}
    assert_equal(served, oracle([request]))
    assert_equal(later, oracle([request]))


# What is chosen does not depend on the sampling, whose fields are in tests/engine/test_engine.py.
@pytest.mark.parametrize(
    ("idle", "wish"),
    [(True, GREEDY), pytest.param(True, CHOOSY, marks=pytest.mark.slow), (False, GREEDY)],
)
def test_left_to_itself_an_engine_sends_several_steps_where_the_device_was_seen_to_wait(
    idle, wish, monkeypatch
):
    engine = engine_for(prefix_cache=False)
    assert engine.multi_step.chosen == StepsPerLaunch(1, automatic=True), (
        "on a CPU a step takes longer than the host needs to send it"
    )
    engine.multi_step.chosen = StepsPerLaunch(4, automatic=True)
    engine.scheduler.most_steps = 4
    monkeypatch.setattr(InFlightStep, "is_done", property(lambda _: idle))
    request = request_of([1, 2, 3], max_tokens=40, **wish)
    single = engine.shapes.choose(1, 1, features_for(request.params), total_tokens=43)
    engine.runner.program(replace(single, steps=4))
    sent = watch(engine)
    engine.run(served := engine.add([request]))
    assert_equal(served, oracle([request]))
    assert (4 in sent) is idle
    assert 4 not in sent[:8]


def test_without_a_warm_up_a_thread_compiles_the_program_of_several_steps_once(monkeypatch):
    """No step waits for it. A strict engine goes on with single steps."""
    monkeypatch.setattr(multi_step, "_COMPILED_AFTER", 16)
    monkeypatch.setattr(InFlightStep, "is_done", property(lambda _: True))
    request = request_of([1, 2, 3], max_tokens=45)
    [wanted] = oracle([request])
    for strict in (True, False):
        programs = Programs(strict=strict)
        programs._programs |= programs_of("plain")._programs
        engine = engine_for(programs=programs, prefix_cache=False)
        engine.multi_step.chosen = StepsPerLaunch(4, automatic=True)
        engine.scheduler.most_steps = 4
        single = engine.shapes.choose(1, 1, Features(), total_tokens=48)
        several = replace(single, steps=4)
        programs._programs.pop(several, None)
        for one in declare_served(engine, request, 1):
            if getattr(one, "steps", 1) == 1:
                engine.runner.program(one)
        programs.seal()
        sent = watch(engine)
        with TRACING_LOCK:
            engine.run(served := engine.add([request]))
            assert programs.is_pending(several) is not strict
            assert programs.pending == (not strict)
        programs.wait()
        assert set(sent) == {1}
        engine.run(later := engine.add([request]))
        assert set(sent) == ({1} if strict else {1, 4})
        assert programs.compiled_late == programs.pending == 0
        assert_equal([*served, *later], [wanted, wanted])


def test_a_program_of_several_steps_that_cannot_be_made_costs_no_request(monkeypatch, caplog):
    monkeypatch.setattr(multi_step, "_COMPILED_AFTER", 4)
    monkeypatch.setattr(InFlightStep, "is_done", property(lambda _: True))
    engine = engine_for(prefix_cache=False)
    engine.multi_step.chosen = StepsPerLaunch(4, automatic=True)
    engine.scheduler.most_steps = 4
    single = engine.shapes.choose(1, 1, Features(), total_tokens=33)
    engine.runner.programs._programs.pop(replace(single, steps=4), None)
    engine.runner._known = {
        one: each for one, each in engine.runner._known.items() if one.steps == 1
    }
    tried = []

    def fail(needed, **options):
        tried.append(needed)
        raise MemoryError("no room to trace")

    monkeypatch.setattr(engine.runner, "compile_in_background", fail)
    sent, request = watch(engine), request_of([1, 2, 3], max_tokens=30)
    engine.run(served := engine.add([request]))
    assert_equal(served, oracle([request]))
    assert len(tried) == 1
    assert set(sent) == {1}
    assert "no room to trace" in caplog.text


@pytest.mark.parametrize(
    ("measured", "idle", "waits"),
    [
        ([(8, 8)], True, True),
        ([(8, 8)], False, False),
        ([(8, 7)], True, False),
        ([(2, 8)], True, False),
        ([(8, 8), (4, 8)], True, True),
    ],
    ids=["waits", "does not wait", "too few steps", "fewer rows", "waits in both"],
)
def test_a_device_that_waited_with_more_rows_is_not_measured_with_fewer(measured, idle, waits):
    """Steps of 4 rows, after some number of steps with these rows."""
    engine = engine_for(prefix_cache=False)
    steps = engine.multi_step
    single = engine.shapes.choose(4, 4, Features(), total_tokens=20)
    assert single.decode
    for rows, count in measured:
        for _ in range(count):
            steps.record(replace(single, tokens=rows, rows=rows), idle=idle)
    assert steps._device_waits(single) is waits
    other = replace(single, features=Features(draws=True))
    assert not steps._device_waits(other)
    for _ in range(8):
        steps.record(single, idle=False)
    assert not steps._device_waits(single), "its own steps tell more"


def test_steps_that_share_keys_are_measured_before_others_are_sent_several_at_a_time():
    """Some 64 samples of a long prompt once took twice as long, since short ones had shown that the device waits."""
    engine = engine_for(prefix_cache=False)
    steps = engine.multi_step
    steps.chosen = StepsPerLaunch(4, automatic=True)
    for number in range(4):
        engine.add([request_of([number] * 3, max_tokens=9)])
    engine.scheduler.dispatched(engine.scheduler.plan().parts)
    parts = engine.scheduler.plan().parts
    own, sharing = (
        engine.shapes.choose(4, 4, Features(), total_tokens=20, shares=shares)
        for shares in (False, True)
    )
    assert (own.rows, sharing.rows, len(parts)) == (4, 4, 4)
    for one in (own, sharing):
        engine.runner._known |= {one: None, replace(one, steps=4): None}
    for _ in range(8):
        steps.record(own, idle=True)
    assert steps.shape(parts) == replace(own, steps=4)
    for _ in range(8):
        assert steps.shape(parts, shares=True) is None
        steps.record(sharing, idle=False)
    assert steps.shape(parts, shares=True) is None, "the device does not wait"
    for _ in range(20):
        steps.record(sharing, idle=True)
    assert steps.shape(parts, shares=True) == replace(sharing, steps=4)
    # Without a program of several steps that share, several that read all keys keep the device busy.
    del engine.runner._known[replace(sharing, steps=4)]
    assert steps.shape(parts, shares=True) == replace(own, steps=4)
    # And so do they while no single step may share.
    steps._measured.pop(sharing)
    assert steps.shape(parts, shares=True) is None
    engine.oom_backoff.note_failure(sharing, MemoryError("no room"), lost=False)
    assert steps.shape(parts, shares=True) == replace(own, steps=4)


def layout_of(model):
    return group_layers((*model.cache_specs(page_size=4, dtype="bfloat16"), SAMPLING))


def chosen_for(config, devices=1):
    """Returns the automatic number of steps for a model of this config in bfloat16."""
    model = build_model(config)
    if devices > 1:
        mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
        model = TensorParallel(model, mesh)
    return choose_steps(None, model, model.param_shapes("bfloat16"), layout_of(model)).number


def test_several_steps_are_chosen_for_small_models_on_a_gpu_alone(monkeypatch):
    """With windows and several kinds of pages too; not for latents that prompts expand, or large models."""
    model = build_model(SHAPES["tiny"])
    keys = LayerSpec(0, gqa(1, 8, dtype="float32", page_size=4))
    plain = group_layers((keys, SAMPLING))
    windowed = group_layers(
        (LayerSpec(0, window(1, 8, window=5, dtype="float32", page_size=2)), SAMPLING)
    )
    expanding = group_layers((LayerSpec(0, mla(16, 8, dtype="float32", page_size=4)), SAMPLING))
    assert expanding.expands
    wide = LayerSpec(2, gqa(2, 8, dtype="float32", page_size=4))
    several = group_layers((keys, wide, SAMPLING))
    small, larger, large = (
        jax.ShapeDtypeStruct((size, 2**20), np.float32) for size in (512, 1024, 1025)
    )
    assert choose_steps(None, model, [small], plain) == StepsPerLaunch(1, automatic=True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    few, more = (StepsPerLaunch(4, automatic=True, rows=rows) for rows in (16, 64))
    assert choose_steps(None, model, [small], plain) == more
    assert choose_steps(None, model, [larger], plain) == few
    assert choose_steps(None, model, [], plain).number == 4
    assert choose_steps(None, model, [large], plain).number == 1
    for layout in (windowed, several):
        assert choose_steps(None, model, [small], layout) == more
    assert choose_steps(None, model, [small], expanding).number == 1
    assert choose_steps(2, model, [large], expanding) == StepsPerLaunch(2)


def test_several_steps_are_chosen_for_recurrent_layers_with_and_without_attention(monkeypatch):
    """On several devices, and on a CPU, steps are sent one by one."""
    hybrid = HYBRID_SHAPES["tiny-hybrid"]
    recurrent = replace(hybrid, pattern=(("mamba2", "gated"),) * 2)
    windowed = replace(hybrid, windows=(None, 64))
    assert not layout_of(build_model(recurrent)).paged_groups
    assert chosen_for(hybrid) == chosen_for(recurrent) == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen_for(hybrid) == chosen_for(recurrent) == 4
    assert chosen_for(windowed) == 4
    assert chosen_for(hybrid, devices=2) == chosen_for(recurrent, devices=2) == 1
    # Without states and windows, two devices have several.
    plain = SHAPES["tiny"]
    assert chosen_for(plain, devices=2) == 4
    assert chosen_for(replace(plain, windows=(64,) * plain.num_layers)) == 4
    assert chosen_for(replace(plain, windows=(64,) * plain.num_layers), devices=2) == 1


def in_fp8(model):
    """Returns the types of parameters with a code of 8 bits and a scale per row where the model takes few bits."""

    def rounded(path, leaf):
        if jax.tree_util.keystr(path, simple=True, separator=".") not in few:
            return leaf
        codes = jax.ShapeDtypeStruct(leaf.shape, jnp.float8_e4m3fn)
        scales = jax.ShapeDtypeStruct((*leaf.shape[:-1], 1), jnp.bfloat16)
        return FewBits(codes, scales, zeros=None, order=None, code="float8_e4m3fn")

    few = model.few_bits_leaves()
    return jax.tree_util.tree_map_with_path(rounded, model.param_shapes("bfloat16"))


QWEN3_NEXT = ModelConfig(
    family="qwen3_next",
    vocab_size=151936,
    hidden_size=2048,
    num_layers=48,
    heads=16,
    kv_heads=2,
    head_dim=256,
    ffn_size=5120,
    max_positions=262144,
    rope=RopeConfig(theta=10000000.0, rotary_dim=64),
    windows=(None,) * 48,
    pattern=((("delta", "mixture+shared"),) * 3 + (("attention", "mixture+shared"),)) * 12,
    qk_norm=True,
    attention_gate=True,
    delta=DeltaConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128, d_conv=4),
    mixture=MixtureConfig(
        experts=512, top_k=10, size=512, gated=True, shared_size=512, shared_gate=True
    ),
)


def test_several_steps_are_chosen_for_a_mixture_of_experts_if_a_row_reads_few_bytes(monkeypatch):
    """Qwen3-Next's 80 billion parameters in fp8 take 75 GiB, of which a row reads 3.7."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model = build_model(QWEN3_NEXT)
    params, layout = in_fp8(model), layout_of(model)
    read, everything = bytes_of_one_row(model, params), bytes_of_types(params)
    assert (round(read / 2**30, 1), round(everything / 2**30)) == (3.7, 75)
    assert choose_steps(None, model, params, layout).number == 4
    # A row reads more in 16 bits, from more experts, and with the fixed order of sums, which reads all of them.
    assert choose_steps(None, model, model.param_shapes("bfloat16"), layout).number == 1
    wide = build_model(replace(QWEN3_NEXT, mixture=replace(QWEN3_NEXT.mixture, top_k=32)))
    assert choose_steps(None, wide, params, layout).number == 1
    assert choose_steps(None, replace(model, batch_invariant=True), params, layout).number == 1


def test_a_row_reads_the_experts_of_its_token_and_not_the_table_of_embeddings():
    """The table of embeddings is read where it makes the logits too, and all of a model that is no `Decoder`."""
    shape = SHAPES["tiny"]
    mixture = MixtureConfig(experts=8, top_k=2, size=32, gated=True)
    config = replace(shape, pattern=(("attention", "mixture"),) * 2, mixture=mixture)
    for tied in (False, True):
        model = build_model(replace(config, tie_embeddings=tied))
        params = model.param_shapes("bfloat16")
        table = 0 if tied else bytes_of_types(params["embed"])
        kept = [
            layer[name] for layer in params["layers"] for name in ("experts_up", "experts_down")
        ]
        unused = bytes_of_types(kept) * 6 // 8
        assert bytes_of_one_row(model, params) == bytes_of_types(params) - unused - table
        # The table of all layers makes no logits, while its projection is read.
        more = build_model(replace(model.config, layer_embedding_size=8))
        params = more.param_shapes("bfloat16")
        table += bytes_of_types(params["layer_embed"])
        assert bytes_of_one_row(more, params) == bytes_of_types(params) - unused - table
    mesh = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,))
    divided = TensorParallel(build_model(config), mesh)
    params = divided.param_shapes("bfloat16")
    assert bytes_of_one_row(divided, params) == bytes_of_types(params)


@pytest.mark.parametrize(
    ("shape", "devices", "number", "rows"),
    [
        ("llama-3.1-8b", 2, 4, 512),
        ("llama-3.1-8b", 4, 4, 512),
        ("llama-3.1-70b", 2, 1, 64),
        ("llama-3.1-70b", 4, 4, 64),
    ],
)
def test_several_devices_have_several_steps_per_launch_while_sending_takes_longer_than_reading(
    shape, devices, number, rows, monkeypatch
):
    """The host needs as long per layer and device as a GPU needs to read 150 MB; sums of many rows keep much memory."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    model = TensorParallel(build_model(SHAPES[shape]), mesh)
    layout = group_layers(model.cache_specs(page_size=64, dtype="bfloat16"))
    chosen = choose_steps(None, model, model.param_shapes("bfloat16"), layout)
    assert chosen == StepsPerLaunch(number, automatic=True, rows=rows)
    sums = 2 * model.num_layers + 1
    kept = sums * (GRANULE + 2 * 2 * rows * model.config.hidden_size)
    assert kept <= 0.7 * 2**30 < kept + sums * GRANULE


@pytest.mark.parametrize(("shape", "rows"), [("llama-3.1-8b", 512), ("llama-3.1-70b", 256)])
def test_sums_by_way_of_mailboxes_allow_as_many_rows_as_a_mailbox_carries(shape, rows, monkeypatch):
    """They keep no memory for a program."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(multi_step, "has_mailboxes", lambda model: True)
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,))
    model = TensorParallel(build_model(SHAPES[shape]), mesh)
    layout = group_layers(model.cache_specs(page_size=64, dtype="bfloat16"))
    chosen = choose_steps(None, model, model.param_shapes("bfloat16"), layout)
    assert chosen.rows == rows
    assert 2 * rows * model.config.hidden_size == MOST_BYTES


def test_programs_of_several_steps_are_those_that_measurements_favour():
    """One device gains with few rows alone; several devices, and those that ask for it, with more."""
    singles = [
        StepSpec(rows, rows, (2,), Features(draws=draws), decode=True)
        for rows in (16, 80)
        for draws in (False, True)
    ]
    blocked = StepSpec(16, 16, (2,), Features(min_tokens=True), decode=True)
    prompt = StepSpec(64, 16, (2,), Features(), decode=False)
    needed = [*singles, blocked, prompt]
    assert declare_multi_steps(needed, StepsPerLaunch(1)) == []
    few = [replace(one, steps=4) for one in singles if one.rows == 16]
    assert declare_multi_steps(needed, StepsPerLaunch(4, automatic=True)) == few
    for chosen in (StepsPerLaunch(4), StepsPerLaunch(4, automatic=True, rows=80)):
        assert declare_multi_steps(needed, chosen) == [replace(one, steps=4) for one in singles]


@pytest.mark.parametrize("steps", [0, 65])
def test_other_numbers_of_steps_are_refused(steps):
    with pytest.raises(ValueError, match="steps_per_launch"):
        EngineConfig(steps_per_launch=steps)

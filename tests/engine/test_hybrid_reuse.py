"""Prefix reuse of models with recurrent layers under faults: no wrong prefix, and never too many tokens."""

import random
from dataclasses import replace

import numpy as np
import pytest

from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.engine.request_state import FINISHED
from tests.engine.engines import VOCAB, assert_idle, fill_free
from tests.engine.hybrid import (
    CHUNK,
    ask,
    assert_same,
    check,
    engine_of,
    places,
    run,
    texts,
    uncached,
)

ALL = CheckpointPolicy()


def engine_for(**options):
    options = {"page": 32, "policy": ALL, "budget": 128} | options
    return engine_of(longest=192, tokens=128, **options)


@pytest.mark.parametrize(
    ("page", "shifts"),
    [
        (32, range(1, 101, 24)),
        pytest.param(32, range(1, 101, 12), marks=pytest.mark.slow),
        pytest.param(8, range(2, 101, 7), marks=pytest.mark.slow),
        pytest.param(32, range(1, 101), marks=pytest.mark.slow),
        pytest.param(8, range(1, 101), marks=pytest.mark.slow),
    ],
)
def test_hits_stay_when_what_is_shared_shifts(page, shifts):
    # vLLM #45238: the only checkpoint of each prompt lay in tokens of its own. Here the third prompt, at the latest,
    # begins where the others stopped to agree, rounded down to the scan's chunk, wherever pages end: those of 8
    # tokens in the middle of a chunk, and those of 32 not at each of its ends.
    engine = engine_for(page=page)
    (shared,) = texts(1, 140)
    last = []
    for shift in shifts:
        made = []
        for user in range(3):
            own = [user] + texts(1000 * shift + user, 20)[0]
            made += run(engine, shared[: 39 + shift] + own, salt=f"{shift}", max_tokens=1)
        assert made[2].cached == (39 + shift) // CHUNK * CHUNK
        last += made[2:]
    assert_idle(engine)
    some = last[::7]
    assert_same(some, uncached(engine, *(one.request.prompt for one in some), max_tokens=1))


@pytest.mark.parametrize("length", [64, 70, 80, 96])
def test_a_checkpoint_inside_a_page_gives_what_an_uncached_run_gives(length):
    engine = engine_for()
    (base, *others) = texts(length, length, 25, 25, 25)
    made = [run(engine, [*base, number, *other])[0] for number, other in enumerate(others)]
    assert made[2].cached == length // CHUNK * CHUNK
    # Its page was forked: the first sequence and the one that continued from it write copies of their own.
    truth = uncached(engine, *([*base, number, *other] for number, other in enumerate(others)))
    assert_same(made, truth)
    assert_idle(engine)


def test_the_next_turn_begins_where_the_last_one_ended():
    engine = engine_for()
    prompt, more = texts(3, 50, 9)
    first = run(engine, prompt, max_tokens=8)[0]
    turn = prompt + first.token_ids + more
    second = run(engine, turn)[0]
    # The last token was chosen, and never computed.
    assert second.cached == len(prompt) + 7
    assert_same([second], uncached(engine, turn))


def test_a_turn_that_stops_before_its_limit_is_found_with_its_stop_token():
    # The step after the stop token is under way when that is read; its states count once it was read as well.
    engine = engine_for()
    prompt, more = texts(3, 50, 9)
    probe = run(engine, prompt, max_tokens=8)[0].token_ids
    stop = probe[3]
    length = probe.index(stop) + 1
    engine.prefix.clear()
    first = engine.add([ask(prompt, max_tokens=40, stop_ids=(stop,))])[0]
    engine.run([first])
    while engine.has_work:
        engine.step()
    assert first.token_ids == probe[:length]
    turn = prompt + first.token_ids + more
    second = run(engine, turn)[0]
    assert second.cached == len(prompt) + length
    assert_same([second], uncached(engine, turn))
    assert_idle(engine)


@pytest.mark.parametrize(
    ("overlap", "stop", "kept"), [(True, 3, 0), (False, 2, 0), (False, 3, 4), (False, 4, 4)]
)
def test_several_steps_in_a_launch_keep_the_end_of_a_turn_unless_they_go_beyond_it(
    monkeypatch, overlap, stop, kept
):
    # Steps behind the one that computes a stop token change the states, so the next turn begins at the prompt's end.
    engine = engine_for(steps_per_launch=4, overlap=overlap)
    sent, run_step = [], engine.sequence_runner.step
    monkeypatch.setattr(
        engine.sequence_runner,
        "step",
        lambda shape, rows: sent.append(shape.steps) or run_step(shape, rows),
    )
    prompt, more = texts(3, 50, 9)
    first = run(engine, prompt, max_tokens=8)[0]
    assert sent == [1, 4, 4]
    limited = prompt + first.token_ids + more
    second = run(engine, limited)[0]
    assert second.cached == len(prompt) + 7
    engine.prefix.clear()
    stopped = run(engine, prompt, max_tokens=40, stop_ids=(first.token_ids[stop],))[0]
    assert stopped.token_ids == first.token_ids[: stop + 1]
    turn = prompt + stopped.token_ids + more
    third = run(engine, turn)[0]
    assert third.cached == len(prompt) + kept
    assert all(one.confirmed for one in engine.prefix._states.kept)
    assert_idle(engine)
    assert_same([second, third], uncached(engine_for(), limited, turn))


def test_an_end_that_a_step_of_its_launch_did_not_compute_is_not_kept(monkeypatch):
    # The last step of the launch computes the stop token, and its logits are not finite.
    engine = engine_for(steps_per_launch=4, overlap=False)
    prompt, more = texts(3, 50, 9)
    probe = run(engine, prompt, max_tokens=8)[0].token_ids
    engine.prefix.clear()
    receive = engine._pipeline.receive

    def broken():
        step, sampled = receive()
        if step.shape.steps == 4:
            sampled[3] = replace(sampled[3], finite=np.zeros_like(sampled[3].finite))
        return step, sampled

    with monkeypatch.context() as patch:
        patch.setattr(engine._pipeline, "receive", broken)
        stopped = run(engine, prompt, max_tokens=40, stop_ids=(probe[3],))[0]
    assert stopped.token_ids == probe[:4]
    assert all(one.confirmed for one in engine.prefix._states.kept)
    # When it comes again and is computed, its end is kept.
    run(engine, prompt, max_tokens=40, stop_ids=(probe[3],))
    turn = prompt + probe[:4] + more
    assert run(engine, turn)[0].cached == len(prompt) + 4


def test_a_turn_whose_last_step_was_never_read_is_kept_when_it_comes_again(monkeypatch):
    # An interrupt forgets the step after the stop token, and so the states that were to count once that was read.
    engine = engine_for()
    (prompt,) = texts(3, 50)
    probe = run(engine, prompt, max_tokens=8)[0].token_ids
    stop = probe[3]
    length = len(prompt) + probe.index(stop) + 1
    engine.prefix.clear()
    wish = ask(prompt, max_tokens=40, stop_ids=(stop,))
    [first] = engine.add([wish])
    while first.status != FINISHED:
        engine.step()
    assert [one.length for one in engine.prefix._states.kept if not one.confirmed] == [length]

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_dispatch_next", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.has_work
    check(engine)
    [again] = engine.add([wish])
    engine.run([again])
    while engine.has_work:
        engine.step()
    assert again.token_ids == first.token_ids
    assert engine.prefix.match([*again.tokens, 1], engine.prefix.keys()).num_tokens == length
    assert_idle(engine)


@pytest.mark.parametrize("checkpoints", [0, 1, 2])
def test_outputs_do_not_depend_on_the_room_for_checkpoints(checkpoints):
    # A, A, B, A over a tiny pool; a request that finds no room for a checkpoint goes on without one.
    engine = engine_for(checkpoints=checkpoints)
    a, tail = texts(5, 90, 30)
    b = a[:48] + tail
    made = [run(engine, prompt)[0] for prompt in (a, a, b, a)]
    assert engine.prefix.num_checkpoints <= checkpoints
    assert (made[1].cached > 0) == (checkpoints > 0)
    assert_same(made, uncached(engine, a, a, b, a))
    if checkpoints == 1:
        assert engine.prefix.stats.checkpoints_dropped + engine.prefix.stats.checkpoint_evictions
    assert_idle(engine)


@pytest.mark.parametrize("checkpoints", [0, 12])
def test_pages_are_shared_even_where_they_must_be_computed_again(checkpoints):
    # Without a state nothing is skipped, but nothing is kept twice.
    engine = engine_for(checkpoints=checkpoints)
    (prompt,) = texts(19, 100)
    first = run(engine, prompt)[0]
    for one in engine.prefix._states.kept:
        engine.prefix._states.remove(one, 0)
    free = engine.sequence_runner.allocator.num_free("gqa")
    packer, written = engine.sequence_runner.packer, []
    pack = packer.pack

    def noting(shape, rows, allocator):
        packed = pack(shape, rows, allocator)
        written.append(
            packer.packed_layout.arrangements(shape)[0].split(packed[0])["gqa.write_slots"].copy()
        )
        return packed

    packer.pack = noting
    made = [engine.add([ask(prompt[:98], max_tokens=8)])[0] for _ in range(2)]
    engine.step()
    check(engine)
    # Three pages are there, so that only the last two tokens are written.
    num_slots = engine.runner.owner.counts["gqa"] * 32
    assert (written[0] < num_slots).nonzero()[0][:2].tolist() == [96, 97]
    tables = [engine.sequence_runner.allocator.pages(one.number, "gqa") for one in made[:1]]
    kept = engine.sequence_runner.allocator.pool("gqa").kept
    assert set(tables[0][:3]) <= kept
    assert engine.sequence_runner.allocator.num_free("gqa") >= free - 2
    engine.run(made)
    assert made[0].cached == 0
    assert_same(
        [first, made[0]], [*uncached(engine, prompt), *uncached(engine, prompt[:98], max_tokens=8)]
    )
    assert_idle(engine)


def test_one_step_of_a_chunk_a_fresh_prompt_a_restored_one_and_a_row_that_generates():
    # The outputs are those of separate runs.
    engine = engine_for(budget=64)
    warm, long, fresh, tail, other = texts(6, 64, 100, 3, 8, 10)
    restored = warm + tail
    run(engine, warm)
    generating = engine.add([ask(other, max_tokens=30)])[0]
    while not generating.generated:
        engine.step()
    others = [engine.add([ask(prompt)])[0] for prompt in (long, restored, fresh)]
    steps, plan = [], engine.scheduler.plan

    def noting():
        made = plan()
        steps.append({part.sequence: (part.start, part.count) for part in made.parts})
        return made

    engine.scheduler.plan = noting
    engine.run([generating, *others])
    check(engine)
    mixed = next(step for step in steps if set(step) == {generating, *others})
    assert [mixed[one] for one in others] == [(48, 52), (64, 8), (0, 3)]
    assert [one.cached for one in others] == [0, 64, 0]
    assert_same([generating], uncached(engine, other, max_tokens=30))
    assert_same(others, uncached(engine, long, restored, fresh))
    assert_idle(engine)


@pytest.mark.parametrize("budget", [32, pytest.param(48, marks=pytest.mark.slow), 128])
def test_chunks_prefixes_and_neighbours_change_nothing(budget):
    # Random arrivals, prompts that share prefixes and cross chunks, and junk in every free page and state.
    engine = engine_for(budget=budget)
    draw = random.Random(budget)
    (stem,) = texts(9, 130)
    prompts = [
        stem[: draw.choice([0, 16, 33, 64, 100])] + texts(number, draw.randrange(1, 40))[0]
        for number in range(10)
    ]
    waiting, made = list(prompts), []
    while waiting or any(one.status != FINISHED for one in made):
        if waiting and draw.random() < 0.5:
            made += engine.add([ask(waiting.pop(0))])
        engine.step()
        if draw.random() < 0.3:
            fill_free(engine.sequence_runner)
        check(engine)
    assert sum(one.cached for one in made) > 0
    assert_same(made, uncached(engine, *prompts))
    assert_idle(engine)


def test_equal_cold_prompts_wait_for_one_another():
    # The second is computed once the first has left its checkpoint; both are counted once.
    engine = engine_for()
    (prompt,) = texts(10, 70)
    made = run(engine, prompt, prompt)
    assert [one.cached for one in made] == [0, 64]
    assert engine.prefix.stats.deferrals == 1
    assert_same(made, 2 * uncached(engine, prompt))


def test_nobody_waits_for_a_checkpoint_that_will_not_be():
    # There is no room for one; later, the request that would leave it is gone.
    engine = engine_for(checkpoints=0)
    (prompt,) = texts(10, 70)
    made = run(engine, prompt, prompt)
    assert [one.cached for one in made] == [0, 0]
    assert engine.prefix.stats.deferrals == 0
    engine = engine_for()
    first, second = (engine.add([ask(prompt)])[0] for _ in range(2))
    engine.step()
    engine.abort(first)
    engine.run([second])
    check(engine)
    assert_same([second], uncached(engine, prompt))
    assert_idle(engine)


def test_prompts_shorter_than_the_convolution_are_kept_and_found():
    # The convolution of up to three tokens also sees those of the zero state.
    engine = engine_for()
    for length in (1, 2, 3, 4):
        short, more = texts(length, length, 7)
        first = run(engine, short, max_tokens=1)[0]
        assert first.cached == 0
        longer = run(engine, short + more)[0]
        assert longer.cached == length
        engine.prefix.clear()
        assert_same([longer], uncached(engine, short + more))
        engine.prefix.clear()


def test_a_lost_checkpoint_falls_back_to_the_one_before():
    # It never falls back to the zero state; pages stay when states are evicted.
    engine = engine_for()
    (prompt,) = texts(12, 100)
    run(engine, prompt[:40])
    run(engine, prompt)
    assert places(engine, prompt) == (32, 40, 96, 100)
    states = engine.prefix._states
    for lost, left in ((96, 40), (40, 32), (32, 0)):
        (one,) = [one for one in states.kept if one.length == lost]
        states.remove(one, 0)
        check(engine)
        told = engine.prefix.explain(prompt)
        assert (told.num_reused, told.groups[0].pages_kept) == (left, 3)
        assert "no checkpoint after" in told.why
    again = run(engine, prompt)[0]
    assert again.cached == 0
    assert engine.prefix.stats.short_of_states == 1
    assert engine.prefix.stats.tokens_without_states == 96
    assert_same([again], uncached(engine, prompt))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_restored_state_is_the_one_that_was_left_bit_for_bit(dtype):
    # It is restored by its id into another request, and unchanged by the requests that ran in between. The state of
    # the recurrence is float32 in every dtype of the model and its convolution.
    engine = engine_for(dtype=dtype)
    prompt, other = texts(13, 64, 90)

    def held(ids):
        live, group = engine.runner.owner.handle().cache, engine.runner.layout.group("mamba2")
        return [
            np.array(live.layer(layer)[array.role][ids])
            for layer in group.layers
            for array in group.spec.arrays
        ]

    run(engine, prompt)
    (one,) = [one for one in engine.prefix._states.kept if one.length == 64]
    before = held(one.states["mamba2"])
    assert [array.dtype.name for array in before] == [dtype, "float32"]
    assert all(array.any() for array in before)
    run(engine, other)
    longer = engine.add([ask(prompt + other[:20], max_tokens=20)])[0]
    engine.scheduler.plan()
    assert (
        engine.sequence_runner.allocator.states(longer.number, "mamba2")[0] == one.states["mamba2"]
    )
    engine.scheduler.requeue_all()
    engine.run([longer])
    for array, again in zip(before, held(one.states["mamba2"]), strict=True):
        np.testing.assert_array_equal(array, again)


def test_a_lost_cache_takes_its_checkpoints_with_it():
    engine = engine_for()
    (prompt,) = texts(14, 70)
    first = run(engine, prompt)[0]
    assert engine.prefix.explain(prompt).num_reused == 64
    running = engine.add([ask([*prompt, 1, 2, 3])])[0]
    engine.step()
    engine.runner.owner.poison("the test says so")
    engine.run([running])
    assert engine.recoveries == 1
    again = run(engine, prompt)[0]
    assert_same([first, again], 2 * uncached(engine, prompt))
    engine.prefix.clear()
    assert engine.prefix.explain(prompt).checkpoints == ()
    assert_idle(engine)


def test_no_hit_and_no_snapshot_compiles_anything():
    # Prompts that hit, diverge and leave checkpoints run in the programs there are.
    engine = engine_for()
    base, tail = texts(15, 100, 20)
    run(engine, base)
    run(engine, base + tail)
    run(engine, base[:70] + tail)
    known = set(engine.runner.programs.manifest())
    draw = random.Random(0)
    for number in range(20):
        prompt = base[: draw.randrange(1, 100)] + texts(number, draw.randrange(1, 30))[0]
        run(engine, prompt)
    assert set(engine.runner.programs.manifest()) == known
    assert engine.prefix.stats.hits > 10


def test_every_count_of_a_scripted_trace():
    # B misses though its first pages are there, and leaves a checkpoint where it diverged; C finds it.
    engine = engine_for(policy=CheckpointPolicy(end_of_prompt=False, end_of_generation=False))
    base, *tails = texts(16, 64, 30, 30, 30)
    for number, tail in enumerate(tails):
        run(engine, [*base, number, *tail])
    stats = engine.prefix.stats
    assert (stats.hits, stats.misses) == (1, 2)
    assert (stats.tokens_reused, stats.tokens_computed) == (64, 3 * 95 - 64)
    assert (stats.short_of_states, stats.tokens_without_states) == (1, 64)
    assert (stats.checkpoints, stats.checkpoints_dropped, stats.checkpoint_evictions) == (4, 0, 0)


def test_models_of_recurrent_layers_alone_begin_from_checkpoints():
    engine = engine_for(pattern=(("mamba2",), ("mamba2",)))
    prompt, more = texts(17, 70, 20)
    first = run(engine, prompt)[0]
    again = run(engine, prompt)[0]
    longer = run(engine, prompt + more)[0]
    assert [one.cached for one in (first, again, longer)] == [0, 64, 70]
    assert_same([first, again, longer], uncached(engine, prompt, prompt, prompt + more))
    assert max(prompt) < VOCAB


def test_samples_of_a_prompt_begin_from_a_checkpoint():
    engine = engine_for()
    prompt, tail = texts(18, 64, 10)
    run(engine, prompt)
    made = engine.add([ask(prompt + tail)] * 3)
    engine.run(made)
    check(engine)
    assert made[0].cached == 64
    assert_same(made, 3 * uncached(engine, prompt + tail))
    assert_idle(engine)


# Of requests to engines that keep last hidden states, so that one set of programs serves all of them here. Greedy ones
# are in test_hybrid_prefix.py.
DRAWN = {"temperature": 1.0, "seed": 7}


# Smaller chunks are in the test of random arrivals.
@pytest.mark.parametrize("budget", [pytest.param(32, marks=pytest.mark.slow), 128])
def test_known_prompts_share_steps_with_all_others(budget):
    # With rows that generate, chunks of prompts and each other; off page ends, and drawn at random.
    engine = engine_for(budget=budget, full_hits=True)
    known = texts(20, 70, 64, 33)
    cold = texts(21, 40, 90)
    run(engine, *known, **DRAWN)
    made = [engine.add([ask(cold[0], **DRAWN)])[0]]
    engine.step()
    made += [engine.add([ask(prompt, **DRAWN)])[0] for prompt in known]
    engine.step()
    made += [engine.add([ask(prompt, **DRAWN)])[0] for prompt in (cold[1], *known)]
    engine.run(made)
    check(engine)
    assert [one.cached for one in made[1:4]] == [70, 64, 33]
    assert [one.cached for one in made[5:]] == [70, 64, 33]
    assert_same(made[1:4], uncached(engine, *known, **DRAWN))
    others = [made[0], *made[4:]]
    assert_same(others, uncached(engine, *cold, *known, **DRAWN))
    assert_idle(engine)


def test_equal_cold_prompts_are_computed_once():
    # Last hidden states are kept: of ten prompts at once, one computes.
    engine = engine_for(full_hits=True)
    (prompt,) = texts(22, 70)
    made = run(engine, *[prompt] * 10, **DRAWN)
    assert sorted(one.cached for one in made) == [0] + [70] * 9
    assert engine.prefix.stats.tokens_computed == 70
    assert_same(made, 10 * uncached(engine, prompt, **DRAWN))


def test_a_known_prompt_that_lost_its_cache_is_computed_again():
    engine = engine_for(full_hits=True)
    (prompt,) = texts(23, 70)
    run(engine, prompt, **DRAWN)
    again = engine.add([ask(prompt, max_tokens=8, **DRAWN)])[0]
    engine.step()
    assert again.cached == 70
    engine.runner.owner.poison("the test says so")
    engine.run([again])
    check(engine)
    assert_same([again], uncached(engine, prompt, max_tokens=8, **DRAWN))
    assert_idle(engine)


def test_a_step_keeps_no_more_states_than_its_program_can():
    # The number is bounded; the other states are counted and left out.
    engine = engine_for()
    made = [engine.add([ask(prompt)])[0] for prompt in texts(24, 40, 50)]
    parts = engine.scheduler.plan().parts
    pipeline = engine._pipeline
    shape = replace(pipeline.shape(parts), pending_checkpoints=1)
    taken = pipeline._state_checkpoints.take_pending(parts, shape)
    assert [(one.row, one.length) for one in taken] == [(0, 32)]
    assert engine.prefix.stats.checkpoints_dropped == 3
    pipeline._state_checkpoints.drop_pending(taken, parts)
    engine.scheduler.requeue_all()
    check(engine)
    engine.run(made)
    assert_idle(engine)


def test_a_step_or_a_copy_that_fails_leaks_no_state(monkeypatch):
    # States taken for a step that was not sent come back; a checkpoint whose page was not copied does not exist.
    engine = engine_for()
    (prompt,) = texts(25, 70)
    step, copy, failed = engine.sequence_runner.step, engine.sequence_runner.copy, []

    def failing(shape, rows):
        if not failed:
            failed.append("step")
            raise ValueError("the test says so")
        return step(shape, rows)

    def failing_copy(copies):
        failed.append("copy")
        raise ValueError("the test says so")

    monkeypatch.setattr(engine.sequence_runner, "step", failing)
    monkeypatch.setattr(engine.sequence_runner, "copy", failing_copy)
    lost = engine.add([ask(prompt)])[0]
    engine.run([lost])
    assert lost.reason == "error"
    check(engine)
    assert engine.prefix.num_checkpoints == 0
    first = run(engine, prompt)[0]
    assert failed[:2] == ["step", "copy"]
    # Only the one at the end of a page needed no copy; it went with the others that its sequence made.
    assert engine.prefix.num_checkpoints <= 1
    monkeypatch.setattr(engine.sequence_runner, "copy", copy)
    assert_same([first], uncached(engine, prompt))
    assert_idle(engine)

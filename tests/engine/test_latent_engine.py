"""The engine chooses the form of latent attention for each step, and the tokens do not depend on it."""

import random
from functools import cache

import numpy as np
import pytest

from jaxkv.engine.request_state import FINISHED
from jaxkv.engine.warm_up import compile_all, declare_served
from jaxkv.errors import ProgramRefused
from jaxkv.programs.manifest import Programs
from jaxkv.runner.rows import Row
from tests.cache.layouts import slots_of
from tests.engine.engines import VOCAB, assert_equal, assert_idle, request_of
from tests.engine.latent import LATENT, LONGEST, PAGE, ROWS, SPARSE, engine_of, model, watch
from tests.engine.oracle import generated

WINDOW = 5


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@cache
def _answers(latent, requests, window=None):
    return list(generated(*model(latent, window=window), requests, rows=ROWS))


def serve(engine, *prompts, latent=LATENT):
    """Serves prompts at once and compares them with the oracle, which shares no pages."""
    requests = tuple(request_of(ids, logprobs=0) for ids in prompts)
    made = [engine.add([request])[0] for request in requests]
    engine.run(made)
    assert_equal(made, _answers(latent, requests))
    return made


@pytest.mark.parametrize(
    ("known", "length", "cached"),
    [
        (0, 30, 0),
        pytest.param(PAGE, 30, PAGE, marks=pytest.mark.slow),
        (3 * PAGE, 30, 3 * PAGE),
        (3 * PAGE, 3 * PAGE, 3 * PAGE - 1),
    ],
)
def test_a_prompt_attends_expanded_unless_some_of_it_is_cached(known, length, cached):
    # The prefix has no page, one, several, or ends within a page, which is copied.
    engine, text = engine_of(), prompt(length)
    if known:
        engine.run(engine.add([request_of(text[:known], logprobs=0)]))
    ran = watch(engine)
    [sequence] = serve(engine, text)
    assert sequence.cached == cached
    first = "expanded" if not cached else "decode" if length - cached == 1 else "absorbed"
    assert ran[0] == first
    assert set(ran[1:]) == {"decode"}
    assert_idle(engine)


def test_one_prompt_in_chunks_begins_expanded_and_goes_on_absorbed():
    # The absorbed path reads what the expanded one wrote.
    engine = engine_of(token_budget=16)
    ran = watch(engine)
    serve(engine, prompt(45))
    assert ran[:3] == ["expanded", "absorbed", "absorbed"]
    assert_idle(engine)


def test_rows_with_and_without_a_prefix_share_an_absorbed_step():
    # One step has a row that decodes, one behind a cached prefix and a new one.
    engine = engine_of()
    long, new = prompt(20, seed=1), prompt(7, seed=2)
    engine.run(engine.add([request_of(long[:16], logprobs=0)]))
    first = engine.add([request_of(prompt(9, seed=3), logprobs=0)])[0]
    engine.step()
    engine.step()
    ran = watch(engine)
    others = [engine.add([request_of(ids, logprobs=0)])[0] for ids in (long, new)]
    engine.run([first, *others])
    assert ran[0] == "absorbed"
    made = [first, *others]
    assert_equal(made, _answers(LATENT, tuple(sequence.request for sequence in made)))
    assert_idle(engine)


def test_after_the_warm_up_both_ways_are_there_and_nothing_compiles():
    # The order of compilation does not matter, and nothing is compiled while serving.
    programs = Programs(strict=True)
    engine = engine_of(programs=programs)
    needed = declare_served(engine, request_of(prompt(40), logprobs=0), ROWS)
    assert {spec.fresh for spec in needed if spec.kind == "prefill"} == {
        False,
        True,
    }
    compile_all(engine.runner, list(reversed(needed)))
    ran = watch(engine)
    serve(engine, prompt(30), prompt(12, seed=4))
    serve(engine, prompt(30)[:24] + prompt(5, seed=5))
    assert programs.compiled_late == 0
    assert {"expanded", "absorbed", "decode"} == set(ran)
    # The manifest has seconds and bytes of each way.
    made = {program.spec.name.split("_")[0]: program for program in programs.manifest()}
    assert {"decode", "fresh", "prefill"} <= made.keys()
    for name in ("decode", "fresh", "prefill"):
        assert made[name].seconds > 0
        assert made[name].report.temp_bytes > 0
    # A request whose program was not declared fails alone, and its error names what is missing.
    [drawn] = engine.add([request_of(prompt(5), temperature=1.0, logprobs=0)])
    engine.run([drawn])
    assert isinstance(drawn.error, ProgramRefused)
    assert "draws is False, not True" in str(drawn.error)


def test_a_program_that_reads_pages_stands_in_for_one_that_does_not_and_never_the_other_way():
    engine = engine_of()
    rows = [Row(0, prompt(20), 0, request_of([1]).params)]
    later = [Row(0, prompt(20), 8, request_of([1]).params)]
    fresh, absorbed = (engine.shapes.declare(each, total_tokens=28) for each in (rows, later))
    assert (fresh.fresh, absorbed.fresh) == (True, False)
    assert absorbed.serves(fresh)
    assert not fresh.serves(absorbed)
    with engine.sequence_runner.reserved(28) as number:
        row = Row(number, prompt(20), 8, request_of([1]).params)
        with pytest.raises(ValueError, match="begin at their first token"):
            engine.sequence_runner.packer.pack(fresh, [row], engine.sequence_runner.allocator)


@pytest.mark.slow
def test_pinned_programs_give_equal_bits_with_and_without_a_prefix():
    # One absorbed program serves every cached length and every neighbour.
    engine, text = engine_of(pinned_shapes=True), prompt(30)
    ran = watch(engine)
    alone = engine.add([request_of(text, logprobs=0)])[0]
    engine.run([alone])
    again = engine.add([request_of(text, logprobs=0)])[0]
    beside = engine.add([request_of(prompt(11, seed=6), logprobs=0)])[0]
    engine.run([again, beside])
    assert again.cached > 0
    assert set(ran) == {"absorbed"}
    assert alone.token_ids == again.token_ids
    assert alone.logprobs == again.logprobs


def test_chosen_tokens_are_the_same_however_a_text_comes_to_be_cached():
    # Index keys of sparse attention share pages with latents, and move with them.
    engine = engine_of(SPARSE)
    long, other = prompt(40, seed=7), prompt(33, seed=8)
    serve(engine, long, prompt(21, seed=9), latent=SPARSE)
    [hit, _] = serve(engine, long[:32] + other[:9], other, latent=SPARSE)
    assert hit.cached == 32
    [again] = serve(engine, long[:32], latent=SPARSE)
    assert again.cached == 31
    assert_idle(engine)


def arriving(seed, count):
    """Draws requests of prompts that often begin alike, some of them as two samples."""
    draw = random.Random(seed)
    stem = prompt(40, seed=seed)
    made = []
    for _ in range(count):
        text = stem[: draw.choice((0, 8, 16, 35))]
        text = text + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
        limits = [draw.randint(5, 14) for _ in range(draw.choice((1, 1, 2)))]
        made.append([request_of(text, logprobs=0, max_tokens=most) for most in limits])
    return made


@pytest.mark.parametrize(
    ("latent", "window"),
    [(LATENT, None), pytest.param(LATENT, WINDOW, marks=pytest.mark.slow), (SPARSE, None)],
    ids=["dense", "beside-window", "sparse"],
)
def test_random_arrivals_have_the_tokens_of_the_oracle_in_a_tight_pool(latent, window):
    """Prefix hits, forks, cut prompts and preemptions change no token."""
    engine = engine_of(latent, free_pages=8, window=window)
    ran, draw = watch(engine), random.Random(1)
    waiting = arriving(seed=10, count=9)
    requests = tuple(request for samples in waiting for request in samples)
    made = []
    while waiting or any(one.status != FINISHED for one in made):
        if waiting and draw.random() < 0.8:
            made += engine.add(waiting.pop(0))
        engine.step()
        engine.sequence_runner.allocator.check()
    assert_equal(made, _answers(latent, requests, window))
    assert any(one.cached for one in made)
    assert any(one.preemptions for one in made)
    assert len(made) > 9, "some are samples of one prompt"
    # Steps of 32 tokens are longer than what is chosen of, so that there is no expanded one.
    assert set(ran) == {"absorbed", "decode", *(["expanded"] if latent is LATENT else [])}
    while engine.has_work:
        engine.step()
    assert_idle(engine)


def places(sequence_runner):
    """Returns what every token's place holds [pages * page size, bytes], by layer and role."""
    cache = sequence_runner.runner.owner.handle().cache
    return {
        key: np.array(array).view(np.uint8).reshape(array.shape[0] * PAGE, -1)
        for key, array in zip(cache.keys, cache.arrays, strict=True)
        if key[1] in ("key", "indexer")
    }


@pytest.mark.parametrize("latent", [LATENT, SPARSE], ids=["dense", "sparse"])
def test_a_short_step_after_a_long_one_reads_nothing_of_it_and_writes_only_its_own(latent):
    """After 32 tokens run 5, then 4, then 1 of one row, each in the one program of its kind."""
    text, params = prompt(10, seed=11), request_of([1], logprobs=0).params
    cuts = ((0, 5), (5, 9), (9, 10))

    def run(engine, *rows):
        shape = engine.shapes.declare(rows, total_tokens=LONGEST)
        return engine.runner.read(engine.sequence_runner.step(shape, rows))[0]

    def rows_of(number):
        return [Row(number, text[begin:end], begin, params) for begin, end in cuts]

    quiet, busy = engine_of(latent), engine_of(latent)
    with quiet.sequence_runner.reserved(len(text)) as number:
        wanted = [run(quiet, row) for row in rows_of(number)]
    sequence_runner = busy.sequence_runner
    with (
        sequence_runner.reserved(20) as first,
        sequence_runner.reserved(12) as second,
        sequence_runner.reserved(len(text)) as number,
    ):
        long = [Row(first, prompt(20), 0, params), Row(second, prompt(12, seed=1), 0, params)]
        for row, (begin, end), want in zip(rows_of(number), cuts, wanted, strict=True):
            run(busy, *long)
            before = places(sequence_runner)
            np.testing.assert_array_equal(run(busy, row), want)
            own = slots_of(
                sequence_runner.allocator,
                sequence_runner.runner.layout.paged_groups[0],
                number,
                begin,
                end,
            )
            for key, after in places(sequence_runner).items():
                changed = np.flatnonzero((before[key] != after).any(axis=1))
                assert set(changed) == set(own), key

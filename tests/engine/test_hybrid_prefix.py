"""The prefix cache of a model with Mamba-2 and attention layers: scripted traces, exact counts, outputs as uncached.

Checkpoints are made where prompts diverge, at the last aligned length and at the one before; the grid is the page size.
"""

from dataclasses import replace

import pytest

from tests.engine.engines import assert_idle
from tests.engine.hybrid import (
    ISSUE,
    ask,
    assert_same,
    check,
    engine_of,
    places,
    run,
    texts,
    uncached,
    watch,
)


def small(**options):
    """Pages of 32 tokens, as in the first traces; a prompt of up to 128 tokens is one step."""
    options = {"policy": replace(ISSUE, grid=32)} | options
    return engine_of(**{"page": 32, "longest": 192, "budget": 128, "tokens": 128} | options)


def large(**options):
    """Pages of 256 tokens; each step with prompts computes as many tokens as the longest prompt of a test has."""
    options = {"policy": replace(ISSUE, grid=256), "longest": 832, "tokens": 512} | options
    return engine_of(**{"page": 256, "budget": options["tokens"]} | options)


# The traces of large pages, and the same ones an eighth as long, in programs that other tests compile.
sizes = pytest.mark.parametrize(
    ("made_for", "page"), [(small, 32), pytest.param(large, 256, marks=pytest.mark.slow)]
)


def start(engine, *prompts, **wishes):
    """Begins sequences and steps until all of their prompts are computed; they go on to hold what they have."""
    made = [engine.add([ask(prompt, max_tokens=100, **wishes)])[0] for prompt in prompts]
    while not all(one.generated for one in made):
        engine.step()
    check(engine)
    return made


def test_a_checkpoint_is_left_where_prompts_diverge():
    # A has 64 tokens, B 128 of which the first 64 are A's, C the first 96 of B.
    engine = small()
    base, more = texts(1, 64, 64)
    prompts = [base, base + more, base + more[:32]]
    steps, made = watch(engine), []
    for prompt, wanted in zip(prompts, [(64,), (64, 128), (64, 96)], strict=True):
        made += run(engine, prompt)
        assert places(engine, prompt) == wanted
    assert steps == [64, 64, 32]
    assert [one.cached for one in made] == [0, 64, 64]
    pages = engine.prefix.explain(prompts[2]).groups[0]
    assert (pages.pages_kept, pages.pages) == (3, 3)
    assert_same(made, uncached(engine, *prompts))
    assert_idle(engine)


def test_a_checkpoint_is_left_at_the_last_place_on_the_grid():
    # Of 80 tokens a snapshot is taken at 64; the other 16 go on from the live state.
    engine = small()
    (prompt,) = texts(2, 80)
    steps = watch(engine)
    first, second = run(engine, prompt)[0], run(engine, prompt)[0]
    assert places(engine, prompt) == (64,)
    assert steps == [80, 16]
    assert (first.cached, second.cached) == (0, 64)
    assert_same([first, second], 2 * uncached(engine, prompt))


@sizes
def test_prompts_that_end_on_the_grid_go_back_one_place_when_repeated(made_for, page):
    # Of large pages 1536 tokens without the index, 1024 with it, as each full hit goes back one page.
    engine = made_for()
    half, rest = texts(3, page, page)
    steps, made = watch(engine), []
    for prompt in (half, half, half + rest, half + rest):
        made += run(engine, prompt)
    assert steps == [page] * 4
    assert_same(made, 2 * uncached(engine, half) + 2 * uncached(engine, half + rest))


@sizes
def test_a_prompt_that_is_known_to_its_end_computes_nothing(made_for, page):
    # With last hidden states kept, a page is computed and then nothing; then one more and nothing.
    engine = made_for(full_hits=True)
    half, rest = texts(3, page, page)
    steps, made = watch(engine), []
    for prompt in (half, half, half + rest, half + rest):
        made += run(engine, prompt)
    assert steps == [page, page]
    assert [one.cached for one in made] == [0, page, page, 2 * page]
    assert engine.prefix.stats.tokens_computed == 2 * page
    assert_same(made, 2 * uncached(engine, half) + 2 * uncached(engine, half + rest))
    assert_idle(engine)


@pytest.mark.slow
def test_the_reference_trace_computes_2008_tokens():
    # 300, then 800 over its first 256, then 800 over the first 512 of that beside 1100 over its first 768, then 800
    # over the first 512: 3800 tokens without the index.
    engine = large(longest=1280, tokens=1200)
    first, second, third, fourth, fifth = texts(4, 300, 544, 288, 332, 288)
    a = first
    b = a[:256] + second
    c, d, e = b[:512] + third, b[:768] + fourth, b[:512] + fifth
    steps, alive = watch(engine), []
    for prompts, kept, holders in (([a], 1, 1), ([b], 2, 2), ([c, d], 5, 4), ([e], 6, 5)):
        alive += start(engine, *prompts)
        assert engine.prefix.num_checkpoints == kept
        page = engine.sequence_runner.allocator.pages(alive[-1].number, "gqa")[0]
        assert engine.sequence_runner.allocator.pool("gqa").references(page) == holders + 1
    assert steps == [300, 544, 876, 288]
    assert sum(steps) == 2008
    assert engine.prefix.stats.tokens_computed == 2008
    assert engine.prefix.stats.tokens_reused == 3800 - 2008
    for one in alive:
        engine.abort(one)
    check(engine)
    made = [run(engine, prompt)[0] for prompt in (c, d, e)]
    assert [one.cached for one in made] == [768, 1024, 768]
    assert_same(made, uncached(engine, c, d, e))


@sizes
def test_a_checkpoint_is_left_in_whichever_chunk_it_falls(made_for, page):
    # Of large pages 800 tokens, 300 per step.
    length, most = 25 * page // 8, 75 * page // 64
    engine = made_for(budget=most)
    (prompt,) = texts(5, length)
    steps = watch(engine)
    first = run(engine, prompt)[0]
    assert places(engine, prompt) == (3 * page,)
    assert sum(steps) == length
    assert max(steps) <= most
    again = run(engine, prompt)[0]
    assert again.cached == 3 * page
    assert_same([first, again], 2 * uncached(engine, prompt))


@sizes
def test_what_was_evicted_is_computed_again(made_for, page):
    # E, F and E of 300 tokens if pages are large, with room for one of them; a page that is not full is not kept.
    engine = made_for(free_pages=2)
    e, f = texts(6, *[75 * page // 64] * 2)
    made = [run(engine, prompt)[0] for prompt in (e, f, e)]
    assert [one.cached for one in made] == [0, 0, 0]
    assert engine.prefix.stats.evictions > 0
    assert_same(made, uncached(engine, e, f, e))


def test_restores_share_a_step():
    # A of 128 tokens; then B and C, 64 of them A's and 32 their own, at once.
    engine = small()
    base, one, other = texts(7, 128, 32, 32)
    b, c = base[:64] + one, base[:64] + other
    run(engine, base)
    # The first to branch off leaves a checkpoint where it did.
    run(engine, base[:64] + texts(8, 9)[0])
    steps = watch(engine)
    made = run(engine, b, c)
    assert steps == [64]
    assert [one.cached for one in made] == [64, 64]
    assert_same(made, uncached(engine, b, c))
    assert_idle(engine)

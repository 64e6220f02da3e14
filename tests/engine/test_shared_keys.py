"""Steps whose rows begin with the same pages: an engine's tokens do not depend on whether these are read once."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams
from jaxkv.engine.steps import step_sizes
from jaxkv.layers import attention
from jaxkv.runner import shared_rows
from jaxkv.sampling.features import Features
from pallas_kernels.shared_keys import ROWS_PER_TILE

ROWS = 12
TOLD = set()
"""The page tables of programs in which attention was told what rows share."""
SYSTEM = [7 + at % 90 for at in range(150)]


def attend_by_way_of_tiles(q, k_pages, v_pages, page_table, seq_lens, *, shared=None, **options):
    """Attention in XLA that believes what it is told: a row's shared pages are those of its tile's first row."""
    if shared is not None:
        TOLD.add(page_table.shape)
        tile = jnp.minimum(shared.places // ROWS_PER_TILE, len(shared.lens) - 1)
        pages = shared.lens[tile] // k_pages.shape[1]
        pages = jnp.where(shared.places < len(shared.rows), pages, 0)
        first = page_table[shared.rows[tile * ROWS_PER_TILE]]
        is_shared = jnp.arange(page_table.shape[1])[None] < pages[:, None]
        page_table = jnp.where(is_shared, first, page_table)
    return pallas_kernels.paged_attention(q, k_pages, v_pages, page_table, seq_lens, **options)


@pytest.fixture
def llm(monkeypatch, request):
    monkeypatch.setattr(attention, "paged_attention", attend_by_way_of_tiles)
    monkeypatch.setattr(step_sizes, "may_share_keys", lambda *_, **__: True)
    monkeypatch.setattr(shared_rows, "_LEAST_BYTES_SAVED", 1)
    with LLM(
        dtype="bfloat16",
        max_model_len=512,
        cache=CacheConfig(max_sequences=ROWS, page_size=32),
        engine=EngineConfig(steps_per_launch=request.param),
    ) as made:
        yield made


def answers(llm, prompts, samples):
    """Returns the tokens of each sample, and how many steps of each form ran."""
    ran, step = Counter(), llm.engine.sequence_runner.step

    def count(shape, rows):
        out = step(shape, rows)
        ran[shape.shares] += shape.decode
        return out

    llm.engine.sequence_runner.step = count
    # Samples stop at different lengths, so that tiles lose rows while steps are in flight.
    params = [
        SamplingParams(n=samples, temperature=0.8, seed=at, max_tokens=5 + 3 * at, ignore_eos=True)
        for at in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params)
    llm.engine.sequence_runner.step = step
    return [[one.token_ids for one in output.outputs] for output in outputs], ran


@pytest.mark.parametrize("llm", [1, 4], indirect=True, ids=["single steps", "four per launch"])
def test_the_tokens_are_those_of_rows_that_share_nothing(llm, monkeypatch):
    """The first prompts fit whole pages and half of one; the last is short and shares nothing."""
    prompts = [SYSTEM + [9] * 42, SYSTEM[:70], [3, 4]]
    TOLD.clear()
    found, ran = answers(llm, prompts, samples=5)
    assert ran[True] > 0
    assert TOLD
    monkeypatch.setattr(llm.engine.shapes, "may_share", lambda _: False)
    llm.engine.clear_prefixes()
    wanted, ran = answers(llm, prompts, samples=5)
    assert not ran[True]
    assert found == wanted


@pytest.mark.parametrize("llm", [1], indirect=True, ids=["single steps"])
def test_tiles_of_other_pages_would_be_seen(llm, monkeypatch, caplog):
    """A seeded defect: keys of another prompt are read where a prompt's own should be."""
    prompts = [SYSTEM + [9] * 42, [*SYSTEM[::-1], 5, 6]]
    wanted, _ = answers(llm, prompts, samples=6)
    packer = llm.engine.sequence_runner.packer
    find = packer.shared_rows

    def confused(*given):
        found = find(*given)
        if found is None or found.lens.size < 2:
            return found
        rows = found.rows.copy()
        rows[[0, -1]] = rows[[-1, 0]]
        return found._replace(rows=rows)

    monkeypatch.setattr(packer, "shared_rows", confused)
    llm.engine.clear_prefixes()
    answers(llm, prompts, samples=6)
    assert "does not begin with the same" in caplog.text
    monkeypatch.setattr(type(packer), "_fill_shared", fill_unchecked)
    llm.engine.clear_prefixes()
    assert answers(llm, prompts, samples=6)[0] != wanted


def fill_unchecked(packer, fields, shared):
    """Does what the packer does, without its check."""
    del packer
    if shared is not None:
        fields["shared_rows"][shared.places] = shared.rows
        fields["shared_places"][shared.rows] = shared.places
        fields["shared_lens"][: len(shared.lens)] = shared.lens


@pytest.mark.parametrize("llm", [1], indirect=True, ids=["single steps"])
def test_a_program_without_memory_is_replaced_by_one_of_the_same_rows_that_shares_nothing(llm):
    """Not by smaller steps: rows that share fewer keys would be cut until they share none."""
    prompts = [SYSTEM + [9] * 42]
    step, counts = llm.engine.sequence_runner.step, Counter()

    def fail(shape, rows):
        if shape.shares:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        counts[len(rows.lens)] += shape.decode
        return step(shape, rows)

    llm.engine.sequence_runner.step = fail
    made, _ = answers(llm, prompts, samples=ROWS)
    assert [len(tokens) for tokens in made[0]] == [5] * ROWS
    counts.clear()
    answers(llm, prompts, samples=ROWS)
    assert set(counts) == {ROWS}


@pytest.mark.parametrize("llm", [1, 4], indirect=True, ids=["single steps", "four per launch"])
def test_an_engine_that_must_not_compile_runs_the_programs_that_it_has(llm, monkeypatch):
    prompts = [SYSTEM + [9] * 42]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.shapes, "may_share", lambda _: False)
        wanted, _ = answers(llm, prompts, samples=8)
    # A strict engine refuses requests that might need a program for one row alone.
    one = llm.engine.shapes.choose(1, 1, Features(draws=True), total_tokens=512)
    llm.engine.runner.program(one)
    llm.engine.clear_prefixes()
    llm.engine.runner.programs.strict = True
    llm.engine.runner.programs.seal()
    found, ran = answers(llm, prompts, samples=8)
    assert found == wanted
    assert not ran[True]

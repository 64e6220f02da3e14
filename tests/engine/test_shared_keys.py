"""Steps whose rows begin with the same pages: an engine's tokens do not depend on whether these are read once."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.engine.steps import step_sizes
from jaxkv.layers import attention
from jaxkv.models.decoder import Decoder
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner import shared_rows
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from pallas_kernels.shared_keys import ROWS_PER_TILE

ROWS, LONGEST = 12, 256
MODEL = Decoder(
    ModelConfig(
        family="llama",
        vocab_size=61,
        hidden_size=32,
        num_layers=1,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn_size=48,
        max_positions=LONGEST,
        rope=RopeConfig(rotary_dim=8),
        windows=(None,),
    )
)
TOLD = set()
"""The page tables of programs in which attention was told what rows share."""
SYSTEM = [7 + at % 50 for at in range(150)]


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


KEPT = {steps: (steps, Programs()) for steps in (1, 4)}
"""Steps of a launch, and the programs of the tests' engines that have so many."""


@pytest.fixture
def engine(monkeypatch, request):
    steps, programs = request.param
    monkeypatch.setattr(attention, "paged_attention", attend_by_way_of_tiles)
    monkeypatch.setattr(step_sizes, "may_share_keys", lambda *_, **__: True)
    monkeypatch.setattr(shared_rows, "_LEAST_BYTES_SAVED", 1)
    params = MODEL.init_params(jax.random.key(5), jnp.bfloat16)
    # Some tokens are clearly more likely than others.
    params = jax.tree.map(
        lambda leaf: leaf * 6 if leaf.ndim == 2 and len(leaf) > 2 else leaf, params
    )
    wish = CacheConfig(max_sequences=ROWS, page_size=32)
    limits = {"dtype": "bfloat16", "max_model_len": LONGEST, "free_bytes": None}
    layout, budget = plan_cache(MODEL, wish, **limits)
    runner = ModelRunner(MODEL, params, layout, budget.counts, programs or Programs())
    made = SequenceRunner(runner, max_tokens=LONGEST, max_rows=ROWS)
    return Engine(made, config=EngineConfig(steps_per_launch=steps))


def answers(engine, prompts, samples):
    """Returns the tokens of each sample, and how many steps of each form ran."""
    ran, step = Counter(), engine.sequence_runner.step

    def count(shape, rows):
        out = step(shape, rows)
        ran[shape.shares] += shape.decode
        return out

    engine.sequence_runner.step = count
    engine.clear_prefixes()
    states = []
    for at, prompt in enumerate(prompts):
        # Samples of another prompt stop earlier, so that tiles lose rows while steps are in flight.
        params = SamplingParams(temperature=0.8, max_tokens=5 + 3 * at, ignore_eos=True)
        wish = {"prompt": tuple(prompt), "params": params, "stop_ids": ()}
        states += engine.add([Request(**wish, seed=10 * at + each) for each in range(samples)])
    engine.run(states)
    engine.sequence_runner.step = step
    return [state.token_ids for state in states], ran


@pytest.mark.parametrize(
    "engine", KEPT.values(), indirect=True, ids=["single steps", "four per launch"]
)
def test_the_tokens_are_those_of_rows_that_share_nothing(engine, monkeypatch):
    """The first prompts fit whole pages and half of one; the last is short and shares nothing."""
    prompts = [SYSTEM + [9] * 42, SYSTEM[:70], [3, 4]]
    found, ran = answers(engine, prompts, samples=5)
    assert ran[True] > 0
    assert TOLD
    monkeypatch.setattr(engine.shapes, "may_share", lambda _: False)
    wanted, ran = answers(engine, prompts, samples=5)
    assert not ran[True]
    assert found == wanted


@pytest.mark.parametrize("engine", [KEPT[1]], indirect=True, ids=["single steps"])
def test_tiles_of_other_pages_would_be_seen(engine, monkeypatch, caplog):
    """A seeded defect: keys of another prompt are read where a prompt's own should be."""
    prompts = [SYSTEM + [9] * 42, [*SYSTEM[::-1], 5, 6]]
    wanted, _ = answers(engine, prompts, samples=6)
    packer = engine.sequence_runner.packer
    find = packer.shared_rows

    def confused(*given):
        found = find(*given)
        if found is None or found.lens.size < 2:
            return found
        rows = found.rows.copy()
        rows[[0, -1]] = rows[[-1, 0]]
        return found._replace(rows=rows)

    monkeypatch.setattr(packer, "shared_rows", confused)
    answers(engine, prompts, samples=6)
    assert "does not begin with the same" in caplog.text
    monkeypatch.setattr(type(packer), "_fill_shared", fill_unchecked)
    assert answers(engine, prompts, samples=6)[0] != wanted


def fill_unchecked(packer, fields, shared):
    """Does what the packer does, without its check."""
    del packer
    if shared is not None:
        fields["shared_rows"][shared.places] = shared.rows
        fields["shared_places"][shared.rows] = shared.places
        fields["shared_lens"][: len(shared.lens)] = shared.lens


@pytest.mark.parametrize("engine", [KEPT[1]], indirect=True, ids=["single steps"])
def test_a_program_without_memory_is_replaced_by_one_of_the_same_rows_that_shares_nothing(engine):
    """Not by smaller steps: rows that share fewer keys would be cut until they share none."""
    prompts = [SYSTEM + [9] * 42]
    step, counts = engine.sequence_runner.step, Counter()

    def fail(shape, rows):
        if shape.shares:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        counts[len(rows.lens)] += shape.decode
        return step(shape, rows)

    engine.sequence_runner.step = fail
    made, _ = answers(engine, prompts, samples=ROWS)
    assert [len(tokens) for tokens in made] == [5] * ROWS
    counts.clear()
    answers(engine, prompts, samples=ROWS)
    assert set(counts) - {1} == {ROWS}, "one sample computes the prompt before the others join"


@pytest.mark.parametrize(
    "engine", [(1, None), (4, None)], indirect=True, ids=["single steps", "four per launch"]
)
def test_an_engine_that_must_not_compile_runs_the_programs_that_it_has(engine, monkeypatch, caplog):
    prompts = [SYSTEM + [9] * 42]
    with monkeypatch.context() as patch:
        patch.setattr(engine.shapes, "may_share", lambda _: False)
        wanted, _ = answers(engine, prompts, samples=8)
    engine.runner.programs.strict = True
    engine.runner.programs.seal()
    found, ran = answers(engine, prompts, samples=8)
    assert found == wanted
    assert not ran[True]
    assert not caplog.records, "no step was refused"

"""With `batch_invariant` a request's tokens and log-probabilities are the same bits, whatever else the engine does.

Each request runs alone, one row per step, without a prefix cache. Then an engine of other shapes serves all of them
together, in random order and arrivals, in chunks, with prefix hits and, where pages are few, with preemptions.
"""

import contextlib
import random
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import LLM, SamplingParams
from jaxkv.config.blocks import DeltaConfig, MambaConfig
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.engine.engine import Engine
from jaxkv.models.decoder import Decoder
from jaxkv.plan import model_for, plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from pallas_kernels.packed import prefill_attention
from tests.engine.engines import TOKENIZER, VOCAB, fill_free, keep_junk, model_of, request_of
from tests.engine.hybrid import model as hybrid_model
from tests.engine.latent import LATENT, SPARSE
from tests.engine.latent import model as latent_model
from tests.step.test_multi_step import Scribe

LONGEST, PAGE = 64, 8
_CHECKPOINTS = 8
SAMPLINGS = (
    {"logprobs": 2},
    {"logprobs": 2, "temperature": 0.9, "top_p": 0.8},
    {"logprobs": 2, "temperature": 1.1, "min_p": 0.05, "repetition_penalty": 1.2},
)


@cache
def recurrent_model():
    """Returns a model of Mamba-2, gated delta and attention layers, and its parameters."""
    made = Decoder(
        ModelConfig(
            family="hybrid",
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=3,
            heads=4,
            kv_heads=2,
            head_dim=8,
            ffn_size=48,
            max_positions=LONGEST,
            rope=RopeConfig(rotary_dim=8),
            windows=(None, None, None),
            pattern=(("mamba2", "gated"), ("delta", "gated"), ("attention", "gated")),
            mamba=MambaConfig(heads=4, head_dim=8, d_state=8, d_conv=4, groups=2, chunk_size=16),
            delta=DeltaConfig(key_heads=1, value_heads=2, key_dim=8, value_dim=8, d_conv=4),
        )
    )
    params = made.init_params(jax.random.key(11), "float32")
    return made, jax.tree.map(
        lambda leaf: leaf * 6 if leaf.ndim > 1 and len(leaf) > 4 else leaf, params
    )


FAMILIES = {
    "dense": lambda: model_of("plain"),
    "latent": lambda: latent_model(LATENT),
    "sparse": lambda: latent_model(SPARSE),
    "recurrent": recurrent_model,
}


def engine_of(family, dtype, *, rows, tokens, pages=None, **config):
    """Returns an engine with one size of each kind of program; its free pages hold junk.

    Args:
        family: a name in `FAMILIES`.
        dtype: of parameters and cache.
        rows: most sequences of a step, and rows of each decode step.
        tokens: tokens of each prefill step.
        pages: pages of each paged group, if not enough for all rows.
        config: fields of `EngineConfig`.
    """
    config = EngineConfig(**{"batch_invariant": True, "token_budget": tokens} | config)
    wish = CacheConfig(max_sequences=rows, page_size=PAGE, checkpoint_bytes=2**22)
    model, params = FAMILIES[family]()
    model = model_for(model, wish, config)
    params = jax.tree.map(
        lambda leaf, wanted: leaf.astype(wanted.dtype), params, model.param_shapes(dtype)
    )
    limits = {"dtype": dtype, "max_model_len": LONGEST, "free_bytes": None}
    layout, budget = plan_cache(model, wish, **limits, speculation=config.speculation)
    counts = dict(budget.counts)
    if pages is not None:
        counts |= {group.name: pages for group in layout.paged_groups}
    # Room for checkpoints of recurrent states, without which these have no prefix hits.
    counts |= {group.name: rows + 1 + _CHECKPOINTS for group in layout.state_groups}
    runner = SequenceRunner(
        ModelRunner(model, params, layout, counts, Programs()), max_tokens=LONGEST, max_rows=rows
    )
    fill_free(runner)
    engine = Engine(runner, TOKENIZER, config)
    engine.shapes.decode_rows, engine.shapes.token_buckets = (rows,), (tokens,)
    engine.scheduler._fill = lambda least, most: most
    keep_junk(engine)
    return engine


def requests_of(count, *, samplings=SAMPLINGS):
    """Returns requests with prompts of 1 to 40 tokens, some of which begin alike."""
    draw = random.Random(7)
    stem = [draw.randrange(VOCAB) for _ in range(40)]
    prompts = [
        stem[: draw.choice((0, 8, 17, 32))]
        + [draw.randrange(VOCAB) for _ in range(draw.choice((1, 2, 7)))]
        for _ in range(count)
    ]
    return [
        request_of(prompt, seed=at, max_tokens=10 + at % 5, **samplings[at % len(samplings)])
        for at, prompt in enumerate(prompts)
    ]


def alone(family, dtype, requests):
    """Returns (tokens, log-probabilities) of each request, computed alone."""
    engine = engine_of(family, dtype, rows=1, tokens=LONGEST, prefix_cache=False)
    return [said(play(engine, [one], random.Random(0))[0]) for one in requests]


def play(engine, requests, draw):
    """Serves requests that arrive in a random order at random steps; returns them in their own order."""
    order, made = list(range(len(requests))), {}
    draw.shuffle(order)
    for at in order:
        made[at] = engine.add([requests[at]])[0]
        while draw.random() < 0.5 and engine.has_work:
            engine.step()
    engine.run(list(made.values()))
    return [made[at] for at in range(len(requests))]


def said(sequence):
    """Returns what must be the same bits."""
    return sequence.tokens, sequence.logprobs


@contextlib.contextmanager
def compiled(*, quickly):
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quickly)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def optimised():
    """Compiles as users do, where the place of a row in a loop may decide its bits."""
    with compiled(quickly=False):
        yield


@pytest.fixture
def unoptimised():
    """Compiles without LLVM's optimisations in `make test-all` too; only an engine asks for few of them by itself."""
    with compiled(quickly=True):
        yield


def test_equal_rows_have_equal_bits_in_programs_that_are_compiled_for_speed(optimised):
    """With JAX 0.12 the first three of four such rows differed from the last one on a CPU."""
    model, params = hybrid_model(pattern=(("attention",),), windows=(None,))
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(17)]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    engine = EngineConfig(batch_invariant=True, prefix_cache=False)
    cache = CacheConfig(max_sequences=4, page_size=8)
    options = {"engine": engine, "cache": cache, "max_model_len": 64, "progress": False}
    with LLM.from_parts(model, params, eos_ids=(3,), **options) as llm:
        [wanted] = llm.generate([prompt], sampling)
        for one in llm.generate([prompt] * 4, sampling):
            assert one.logprobs == wanted.logprobs


def test_tokens_and_log_probabilities_are_the_same_bits_alone_and_among_others():
    """Chunks of a prompt, prefix hits, preemptions and steps of another size change none of them."""
    requests = requests_of(6, samplings=SAMPLINGS[:1])
    wanted = alone("dense", "float32", requests)
    engine = engine_of("dense", "float32", rows=4, tokens=16, pages=8)
    draw, served = random.Random(1), []
    for _ in range(3):
        served += play(engine, requests, draw)
        assert [said(one) for one in served[-len(requests) :]] == wanted
    assert sum(one.preemptions for one in served) > 0
    assert sum(one.cached for one in served) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_bits_in_every_composition(family, dtype):
    """Rows, chunks, pages, bursts of decode steps and sampling parameters differ between the engines."""
    requests = requests_of(15)
    wanted = alone(family, dtype, requests)
    ways = (
        {"rows": 5, "tokens": 9, "pages": 12},
        {"rows": 12, "tokens": 48},
        {"rows": 7, "tokens": 24, "steps_per_launch": 3, "overlap": False},
    )
    preempted = cached = 0
    for seed, way in enumerate(ways):
        engine = engine_of(family, dtype, **way)
        for repeat in range(3):
            served = play(engine, requests, random.Random(10 * seed + repeat))
            assert [said(one) for one in served] == wanted, (way, repeat)
            preempted += sum(one.preemptions for one in served)
            cached += sum(one.cached for one in served)
    assert preempted > 0
    assert cached > 0


@pytest.mark.slow
def test_tiles_of_queries_that_depend_on_the_batch_are_found(monkeypatch):
    """The defect: attention divides its queries and keys by the sizes of the step, as without the fixed order."""
    requests = requests_of(6, samplings=SAMPLINGS[:1])
    wanted = alone("dense", "float32", requests)
    monkeypatch.setattr(prefill_attention, "is_fixed", lambda: False)
    engine = engine_of("dense", "float32", rows=3, tokens=16)
    assert [said(one) for one in play(engine, requests, random.Random(1))] != wanted


def test_prefixes_of_another_order_of_sums_are_not_taken():
    """The model's description, which names saved and cached prefixes, tells the orders apart."""
    model, _ = model_of("plain")
    invariant = model_for(model, CacheConfig(), EngineConfig(batch_invariant=True))
    assert invariant.batch_invariant
    assert repr(invariant) != repr(model)
    assert model_for(model, CacheConfig(), EngineConfig()) == model


def test_models_whose_sums_are_their_own_are_refused():
    with pytest.raises(ValueError, match=r"batch_invariant needs a Decoder, .* got a Scribe"):
        model_for(Scribe(), CacheConfig(), EngineConfig(batch_invariant=True))


def test_an_engine_refuses_a_model_without_the_fixed_order():
    engine = engine_of("dense", "float32", rows=2, tokens=16, batch_invariant=False)
    with pytest.raises(ValueError, match="batch_invariant needs a model with it"):
        Engine(engine.sequence_runner, TOKENIZER, replace(engine.config, batch_invariant=True))


def test_latents_are_not_expanded_under_the_fixed_order():
    """The expanded form of a whole prompt has other sums than the one over pages."""
    wish = CacheConfig(max_sequences=2, page_size=PAGE)
    limits = {"dtype": "float32", "max_model_len": LONGEST, "free_bytes": None}
    model, _ = latent_model(LATENT)
    expands = [
        plan_cache(one, wish, **limits)[0].expands
        for one in (model, replace(model, batch_invariant=True))
    ]
    assert expands[0] > 0
    assert expands[1] == 0


# The one that chooses among tokens has the products of the other, and more.
@pytest.mark.parametrize(
    "latent",
    [
        pytest.param(LATENT, id="latent", marks=pytest.mark.slow),
        pytest.param(SPARSE, id="sparse"),
    ],
)
def test_a_text_in_one_step_has_the_bits_of_decode_steps_without_an_engine(latent, unoptimised):
    """A step over whole texts is fresh, but latents are not expanded; `SPARSE` chooses all of so few tokens."""
    model, params = latent_model(latent)
    invariant = replace(model, batch_invariant=True)
    text = np.random.default_rng(0).integers(VOCAB, size=(1, 12)).astype(np.int32)
    whole = jaxkv.score(params, invariant, text)
    given = jaxkv.score(params, invariant, text[:, :5], text[:, 5:])
    np.testing.assert_array_equal(whole[:, 5:], given)

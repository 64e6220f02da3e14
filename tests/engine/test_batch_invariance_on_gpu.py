"""On a GPU: the kernels' fixed order of sums gives a row the same bits in calls of any size, and so do engines on them.

What the rules rest on is proved here alone: a column of a wgmma product does not depend on the product's width.
"""

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import LLM, SamplingParams, default_model
from jaxkv.bench.shapes import SHAPES
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.engine import Engine
from jaxkv.models.registry import build_model
from jaxkv.plan import model_for, plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from pallas_kernels import ragged_attention, skinny_matmul
from pallas_kernels.fixed_order import fixed_order
from tests.engine.engines import request_of
from tests.engine.test_batch_invariance import play, said
from tests.test_on_gpu import MODEL

pytestmark = pytest.mark.gpu

LONGEST = 256
COUNT = 256


def bits(array):
    return [row.tobytes() for row in np.asarray(array)]


def fixed(function, *arguments):
    with fixed_order():
        return jax.jit(function)(*arguments)


@pytest.mark.parametrize(
    ("inner", "out", "gated"), [(4096, 6144, False), (4096, 28672, True), (1024, 1024, False)]
)
def test_rows_of_a_product_have_the_same_bits_in_calls_of_any_size(inner, out, gated):
    """The products are right, and 1 to 300 rows have the bits that each row has alone."""
    keys = jax.random.split(jax.random.key(3), 3)
    weight = jax.random.normal(keys[0], (out, inner), jnp.bfloat16) * inner**-0.5
    x = jax.random.normal(keys[1], (300, inner), jnp.bfloat16)
    squares = jax.random.uniform(keys[2], (64, 300), jnp.float32, 1.0, 2.0)
    options = {"gated": gated, "norm_eps": 1e-6, "implementation": "mosaic_gpu"}
    run = partial(skinny_matmul, activation="silu" if gated else None, **options)

    def multiply(rows):
        return fixed(lambda w, x, s: run(w, x, squares=s), weight, x[rows], squares[:, rows])

    everything = np.arange(300)
    whole = multiply(everything)
    exact = np.asarray(x[:5], np.float64) @ np.asarray(weight, np.float64).T
    exact /= np.sqrt(np.asarray(squares[:, :5], np.float64).sum(0) / inner + 1e-6)[:, None]
    if gated:
        gate, up = np.split(exact, 2, axis=1)
        exact = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(np.asarray(whole[:5], np.float64), exact, atol=0.02, rtol=0.02)
    wanted = bits(whole)
    for rows in ([299], [64, 3], everything[40:49], everything[100:160], everything[64:200]):
        assert bits(multiply(np.asarray(rows))) == [wanted[row] for row in rows], len(rows)


@pytest.mark.parametrize("window", [None, 200])
def test_queries_have_the_same_bits_as_a_prompt_and_one_by_one(window):
    """The last 40 tokens of a prompt of 700, each as a row of its own beside others."""
    keys = jax.random.split(jax.random.key(4), 3)
    pools = [jax.random.normal(key, (64, 16, 2, 128), jnp.bfloat16) for key in keys[:2]]
    q = jax.random.normal(keys[2], (700, 8, 128), jnp.bfloat16)
    table = np.arange(64, dtype=np.int32)
    run = partial(ragged_attention, scale=0.09, window=window, implementation="mosaic_gpu")

    def attend(q, table, seq_lens, bounds):
        arrays = [jnp.asarray(each, jnp.int32) for each in (table, seq_lens, bounds)]
        return bits(fixed(run, q, *pools, *arrays))

    whole = attend(q, table[None], [700], [0, 700])
    alone = attend(q[660:], np.tile(table, (40, 1)), 661 + np.arange(40), np.arange(41))
    assert alone == whole[660:]
    assert attend(q[300:], table[None], [700], [0, 400]) == whole[300:]


def engine_of(*, rows, tokens, pages=None, **config):
    config = EngineConfig(batch_invariant=True, token_budget=tokens, **config)
    wish = CacheConfig(max_sequences=rows, page_size=16)
    model = model_for(MODEL, wish, config)
    params = jax.tree.map(
        lambda leaf: leaf * 4 if leaf.ndim == 2 and leaf.shape[0] > 2 else leaf,
        model.init_params(jax.random.key(1), jnp.bfloat16),
    )
    limits = {"dtype": "bfloat16", "max_model_len": LONGEST, "free_bytes": None}
    layout, budget = plan_cache(model, wish, **limits)
    counts = dict(budget.counts)
    if pages is not None:
        counts |= {group.name: pages for group in layout.paged_groups}
    runner = ModelRunner(model, params, layout, counts, Programs())
    engine = Engine(SequenceRunner(runner, max_tokens=LONGEST, max_rows=rows), None, config)
    run_in_few_programs(engine, (rows,), (tokens,))
    return engine


def run_in_few_programs(engine, rows, tokens):
    """Lets an engine compile programs of these sizes alone: a GPU takes five seconds or more for each."""
    engine.shapes.decode_rows, engine.shapes.token_buckets = rows, tokens
    # Prompts are not cut to sizes with little padding.
    engine.scheduler._fill = lambda least, most: most


def test_requests_have_the_same_bits_alone_and_among_others():
    """On our kernels, in bfloat16, with random rows, chunks, hits, preemptions and bursts, in few programs."""
    draw = random.Random(2)
    stem = [draw.randrange(512) for _ in range(160)]
    requests = [
        request_of(
            stem[: draw.choice((0, 40, 130))] + [draw.randrange(512) for _ in range(1 + at)],
            seed=at,
            max_tokens=24,
            logprobs=2,
            temperature=0.8,
            top_p=0.9,
        )
        for at in range(16)
    ]
    lonely = engine_of(rows=1, tokens=256, prefix_cache=False)
    assert lonely.runner.implementation.name == "mosaic_gpu"
    wanted = [said(play(lonely, [one], draw)[0]) for one in requests]
    preempted = cached = 0
    for way in (
        {"rows": 4, "tokens": 24, "pages": 16},
        {"rows": 16, "tokens": 512, "steps_per_launch": 4},
    ):
        served = play(engine_of(**way), requests, draw)
        assert [said(one) for one in served] == wanted, way
        preempted += sum(one.preemptions for one in served)
        cached += sum(one.cached for one in served)
    assert preempted > 0
    assert cached > 0


def texts_of(vocab):
    """Returns prompts of 1 to 400 tokens, half of which begin alike, and parameters for all ways to draw."""
    draw = random.Random(3)
    stem = [draw.randrange(vocab) for _ in range(300)]
    ways = (
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.1, "top_k": 20, "min_p": 0.02},
    )
    prompts = [
        stem[: draw.choice((0, 0, 64, 250))]
        + [draw.randrange(vocab) for _ in range(draw.randint(1, 150))]
        for _ in range(COUNT)
    ]
    params = [
        SamplingParams(
            seed=at,
            max_tokens=draw.randint(8, 48),
            ignore_eos=True,
            logprobs=1,
            **({"temperature": 0.0} | ways[at % 3]),
        )
        for at in range(COUNT)
    ]
    return prompts, params


@pytest.mark.parametrize("name", ["package", "llama-3.1-8b"])
def test_many_requests_in_two_orders_have_the_same_bits(name):
    """The second order finds prefixes of the first in the cache, and shares its steps with other requests."""
    options = {"cache": CacheConfig(max_sequences=96), "max_model_len": 512, "dtype": "bfloat16"}
    options |= {"batch_invariant": True, "progress": False}
    if name == "package":
        llm = LLM(default_model.path(), **options)
    else:
        model = build_model(SHAPES[name])
        params = model.init_params(jax.random.key(0), jnp.bfloat16)
        llm = LLM.from_parts(model, params, **options)
        run_in_few_programs(llm.engine, (24, 96), (256, 2048))
    prompts, params = texts_of(llm.model.vocab_size)
    order = random.Random(5).sample(range(COUNT), COUNT)
    with llm:
        first = llm.generate(prompts, params)
        second = llm.generate([prompts[at] for at in order], [params[at] for at in order])
    for at, again in zip(order, second, strict=True):
        assert again.outputs[0].token_ids == first[at].outputs[0].token_ids, at
        assert again.outputs[0].logprobs == first[at].outputs[0].logprobs, at

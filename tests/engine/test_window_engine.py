"""A model with windows of two lengths, sinks and soft caps, served from pools too small for whole sequences.

Freed pages are filled with NaN before the next step, so that a window that is one token too small would be found.
"""

import random
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.engine.engine import Engine
from jaxkv.engine.request_state import FINISHED
from jaxkv.models.decoder import Decoder
from jaxkv.plan import plan_cache, tokens_ahead
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.scoring import score_texts
from jaxkv.runner.sequence_runner import SequenceRunner
from tests.engine.engines import assert_equal, assert_idle, fill_free, keep_junk, request_of
from tests.engine.oracle import generated
from tests.few_programs import few_programs
from tests.models.driver import Driver

VOCAB, LONGEST, ROWS, PAGE, BUDGET = 61, 64, 4, 4, 16
WINDOWS = (5, None, 9)
CONFIG = ModelConfig(
    family="gemma3_text",
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_size=48,
    max_positions=LONGEST,
    rope=RopeConfig(rotary_dim=8),
    window_rope=RopeConfig(rotary_dim=8, theta=100.0),
    windows=WINDOWS,
    attention_cap=20.0,
    logit_cap=30.0,
    sinks=True,
    post_norms=True,
    unit_offset=True,
    qk_norm=True,
)


@pytest.fixture(scope="module")
def model():
    """A decoder of three layers and its parameters, larger than they are drawn, so that tokens differ clearly."""
    model = Decoder(CONFIG)
    params = model.init_params(jax.random.key(7), jnp.float32)
    return model, jax.tree.map(
        lambda leaf: leaf * 6 if leaf.ndim == 2 and len(leaf) > 2 else leaf, params
    )


@pytest.fixture(scope="module")
def programs():
    """Returns compiled programs by the sizes of the pools that they are for."""
    return defaultdict(Programs)


def engine_of(model, programs, *, overlap=True, prefix_cache=True, **pages):
    """Returns an engine whose pools are those that `LLM` would make, but for those given."""
    decoder, params = model
    wish = CacheConfig(max_sequences=ROWS, page_size=PAGE)
    config = EngineConfig(token_budget=BUDGET, overlap=overlap, prefix_cache=prefix_cache)
    ahead = tokens_ahead(decoder, wish, config, LONGEST)
    assert ahead == BUDGET * (1 + overlap)
    limits = {"dtype": "float32", "max_model_len": LONGEST, "free_bytes": None}
    layout, budget = plan_cache(decoder, wish, **limits, ahead=ahead)
    sequence_runner = SequenceRunner(
        ModelRunner(decoder, params, layout, dict(budget.counts) | pages, programs[repr(pages)]),
        max_tokens=LONGEST,
        max_rows=ROWS,
    )
    fill_free(sequence_runner)
    engine = few_programs(Engine(sequence_runner, None, config))
    keep_junk(engine)
    return engine


def test_pools_have_room_for_all_tokens_of_the_multi_step_programs_in_flight():
    """Else windows that are as tight as the plan makes them would never leave pages for several steps at once."""
    decoder = Decoder(CONFIG)
    cache = CacheConfig(max_sequences=ROWS, page_size=PAGE)
    for steps, ahead in ((None, BUDGET), (2, BUDGET), (8, 8 * ROWS)):
        config = EngineConfig(token_budget=BUDGET, steps_per_launch=steps)
        assert tokens_ahead(decoder, cache, config, LONGEST) == 2 * ahead


def requests_of(seed, count):
    """Prompts that often begin like another one, some longer than a step and all windows together."""
    draw = random.Random(seed)
    stem = [draw.randrange(VOCAB) for _ in range(30)]
    return [
        request_of(
            stem[: draw.choice((0, 9, 22, 30))]
            + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))],
            max_tokens=draw.randint(1, 14),
        )
        for _ in range(count)
    ]


def serve(engine, requests, seed):
    """Adds requests at random times; returns their sequences and the most pages that any held in each group."""
    draw, waiting, sequences, most = random.Random(seed), list(requests), [], {}
    while waiting or any(one.status != FINISHED for one in sequences):
        if waiting and draw.random() < 0.4:
            sequences += engine.add([waiting.pop(0)])
        engine.step()
        engine.sequence_runner.allocator.check()
        for held in engine.sequence_runner.allocator.view().sequences.values():
            for name, pages in held.pages.items():
                most[name] = max(most.get(name, 0), len(pages) - held.unneeded[name])
    return sequences, most


# Programs are compiled for the sizes of pools, so all but one case share theirs.
TIGHT = {"window": 9, "window-2": 10}
CASES = {
    "tight": TIGHT,
    "tight-without-prefixes": {**TIGHT, "prefix_cache": False},
    "tight-in-step": {**TIGHT, "overlap": False},
    "planned": {},
}


@pytest.mark.parametrize(
    "case", [*list(CASES)[:3], pytest.param("planned", marks=pytest.mark.slow)]
)
def test_random_arrivals_have_the_tokens_of_the_oracle(model, programs, case):
    """Memory is bounded, hits and preemptions change no token, and no page leaks."""
    engine = engine_of(model, programs, **CASES[case])
    requests = requests_of(3, 14)
    sequences, most = serve(engine, requests, 5)
    assert_equal(sequences, generated(*model, requests, rows=ROWS))
    assert most["gqa"] > 10, "some texts are longer than every window and step"
    steps = 2 if engine.config.overlap else 1
    for group in engine.runner.layout.paged_groups:
        if group.window is not None:
            assert most[group.name] <= -(-(group.window + steps * BUDGET) // PAGE) + 1
    if engine.prefix is not None:
        assert engine.prefix.stats.tokens_reused > 20
    while engine.has_work:
        engine.step()
    assert_idle(engine)


def test_a_text_longer_than_the_windows_pools_is_scored_in_parts(model, programs):
    engine = engine_of(model, programs, **TIGHT)
    sequence_runner, decoder = engine.sequence_runner, model[0]
    draw = random.Random(9)
    text = tuple(draw.randrange(VOCAB) for _ in range(60))
    assert sequence_runner.allocator.most_ahead < 60
    [scores] = score_texts(sequence_runner, [text])
    driver = Driver(decoder, model[1], page_size=PAGE, max_tokens=LONGEST)
    [logits] = driver.prefill([text])
    wanted = jax.nn.log_softmax(logits, axis=1)[np.arange(59), np.asarray(text[1:])]
    np.testing.assert_allclose(scores, wanted, atol=1e-4)
    assert_idle(engine)


def test_a_pool_too_small_for_a_window_says_what_it_can_hold(model, programs):
    engine = engine_of(model, programs, **{"window-2": 2})
    with pytest.raises(ValueError, match="needs room for 14 tokens, but one sequence can have 8"):
        engine.add([request_of([1] * 10, max_tokens=5)])
    roomy = engine_of(model, programs)
    assert len(roomy.add([request_of([1] * 50, max_tokens=14)])) == 1

"""Keys that are read once for several rows, on a GPU: log-probabilities are as near to float32 as without that."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.given_samples import scores_of
from jaxkv.models.decoder import Decoder
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner import shared_rows
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner

pytestmark = pytest.mark.gpu

MODEL = Decoder(
    ModelConfig(
        family="llama",
        vocab_size=512,
        hidden_size=256,
        num_layers=2,
        heads=8,
        kv_heads=2,
        head_dim=64,
        ffn_size=512,
        max_positions=512,
        rope=RopeConfig(rotary_dim=64),
        windows=(None, None),
    )
)
ROWS, LONGEST, NEW = 80, 384, 24


@pytest.fixture(scope="module")
def params():
    drawn = MODEL.init_params(jax.random.key(1), jnp.bfloat16)
    return jax.tree.map(
        lambda leaf: leaf * 4 if leaf.ndim == 2 and leaf.shape[0] > 2 else leaf, drawn
    )


def sequence_runner_of(model, params, dtype):
    layout, budget = plan_cache(
        model,
        CacheConfig(max_sequences=ROWS, page_size=64),
        dtype=dtype,
        max_model_len=LONGEST,
        free_bytes=None,
    )
    runner = ModelRunner(model, params, layout, budget.counts, Programs())
    return SequenceRunner(runner, max_tokens=LONGEST, max_rows=ROWS)


def prompts(swapped=False):
    """Half of them behind one prefix, a quarter behind another, and a quarter alone."""
    draw = np.random.default_rng(0)
    prefixes = [draw.integers(0, 512, length).tolist() for length in (300, 130)]
    if swapped:
        prefixes[0][:64], prefixes[0][64:128] = prefixes[0][64:128], prefixes[0][:64]
    for row in range(ROWS):
        begin = prefixes[0] if row % 2 else prefixes[1] if row % 4 else []
        yield (*begin, *draw.integers(0, 512, 7 + row % 5).tolist())


def logprobs_of(model, params, dtype="bfloat16", *, steps=1, shares=False, swapped=False):
    """Returns the log-probabilities of the tokens that rows are given, [rows, tokens], and the forms of steps."""
    sequence_runner = sequence_runner_of(model, params, dtype)
    engine = Engine(sequence_runner, config=EngineConfig(steps_per_launch=steps))
    ran, step, may_share = Counter(), sequence_runner.step, engine.shapes.may_share
    engine.shapes.may_share = lambda rows: shares and may_share(rows)

    def count(shape, rows):
        out = step(shape, rows)
        ran[shape.shares] += shape.decode
        return out

    sequence_runner.step = count
    wish = SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=0, ignore_eos=True)
    given = np.random.default_rng(1).integers(0, 512, (ROWS, NEW)).tolist()
    requests = [
        Request(prompt=text, params=wish, seed=0, stop_ids=(), given=tuple(tokens))
        for text, tokens in zip(prompts(swapped), given, strict=True)
    ]
    states = [engine.add([request])[0] for request in requests]
    engine.run(states)
    scores = [scores_of([state], [tuple(row)])[0] for state, row in zip(states, given, strict=True)]
    return np.array(scores, np.float64), ran


@pytest.mark.parametrize("steps", [1, 4])
def test_log_probabilities_are_as_near_to_float32_as_those_of_rows_that_read_their_own_keys(
    params, steps, monkeypatch
):
    """Both round the same numbers; only the order of sums differs. A wrong page costs far more."""
    monkeypatch.setattr(shared_rows, "_LEAST_BYTES_SAVED", 1)
    shared, ran = logprobs_of(MODEL, params, steps=steps, shares=True)
    assert ran[True] >= NEW // steps // 2
    own, ran = logprobs_of(MODEL, params, steps=steps)
    assert not ran[True]
    xla, wide = MODEL.running("xla"), jax.tree.map(lambda leaf: leaf.astype("float32"), params)
    exact, _ = logprobs_of(xla, wide, "float32")
    wrong, _ = logprobs_of(xla, wide, "float32", swapped=True)

    def error(found):
        return np.sqrt(np.mean((found - exact)[1::2] ** 2))

    assert error(shared) < 1.2 * error(own)
    assert error(wrong) > 5 * error(own)

"""A stream gives the tokens of `generate` for every chunking of its prompt, and frees its pages."""

import jax
import jax.numpy as jnp
import pytest

from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.drive import serve_stream
from jaxkv.engine.engine import Engine
from jaxkv.engine.engine_lock import EngineLock
from jaxkv.engine.request import Request
from jaxkv.models.decoder import Decoder
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from tests.engine.oracle import generated


def engine_for(rope):
    """Returns an engine whose steps hold 8 tokens."""
    model = Decoder(
        ModelConfig(
            family="llama",
            vocab_size=61,
            hidden_size=32,
            num_layers=2,
            heads=4,
            kv_heads=2,
            head_dim=8,
            ffn_size=48,
            max_positions=64,
            rope=rope,
            windows=(None, 5),
        )
    )
    params = model.init_params(jax.random.key(5), jnp.float32)
    params = jax.tree.map(
        lambda leaf: leaf * 6 if leaf.ndim == 2 and len(leaf) > 2 else leaf, params
    )
    wish = CacheConfig(max_sequences=2, page_size=8)
    layout, budget = plan_cache(model, wish, dtype="float32", max_model_len=64, free_bytes=None)
    limits = {"max_tokens": 64, "max_rows": 2}
    sequence_runner = SequenceRunner(
        ModelRunner(model, params, layout, budget.counts, Programs()), **limits
    )
    return Engine(sequence_runner, config=EngineConfig(token_budget=8))


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(rotary_dim=8),
        # The angles of every token depend on how long its prompt is, so this one is not cut.
        pytest.param(
            RopeConfig(rotary_dim=8, kind="dynamic", factor=4.0, original_max_positions=16),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            RopeConfig(rotary_dim=8, kind="yarn", factor=4.0, original_max_positions=16),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda rope: rope.kind,
)
def test_a_prompt_of_several_chunks_streams_the_tokens_of_the_loop(rope):
    """A prompt of 30 tokens runs in chunks of 8, past the original context."""
    engine = engine_for(rope)
    request = Request(
        prompt=tuple((7 * place) % 61 for place in range(30)),
        params=SamplingParams(temperature=0.0, max_tokens=12, logprobs=5),
        seed=0,
        stop_ids=(),
    )
    sequence_runner = engine.sequence_runner
    [whole] = generated(
        sequence_runner.runner.model, sequence_runner.runner.params, [request], rows=1
    )
    streamed = list(serve_stream(EngineLock(), engine, request))
    assert tuple(piece.token_id for piece in streamed) == whole.token_ids
    # Equal tokens may be luck; the numbers behind them are not.
    for piece, wanted in zip(streamed, whole.logprobs, strict=True):
        assert piece.logprobs == pytest.approx(wanted, abs=1e-4)
    assert engine.steps == 11 + (1 if sequence_runner.runner.model.whole_prompts else 4)
    sequence_runner.allocator.check()
    assert not engine.scheduler.running

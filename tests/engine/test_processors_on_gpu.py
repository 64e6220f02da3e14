"""Logits processors in programs of our kernels: the tokens are those of a NumPy reference, whatever the GPU rounds."""

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
from jaxkv.models.decoder import Decoder
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from tests.sampling.processors import processed, registered

pytestmark = pytest.mark.gpu

VOCAB, LONGEST = 512, 256
MODEL = Decoder(
    ModelConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=256,
        num_layers=2,
        heads=8,
        kv_heads=2,
        head_dim=64,
        ffn_size=512,
        max_positions=LONGEST,
        rope=RopeConfig(rotary_dim=64),
        windows=(None, None),
    )
)
CALLS = {"digest": {"factor": 3}}


def engine_of(steps):
    known = registered(VOCAB, LONGEST)
    layout, budget = plan_cache(
        MODEL,
        CacheConfig(max_sequences=4, page_size=64),
        dtype="bfloat16",
        max_model_len=LONGEST,
        free_bytes=None,
        processor_words=known.num_words,
    )
    params = MODEL.init_params(jax.random.key(1), jnp.bfloat16)
    runner = ModelRunner(MODEL, params, layout, budget.counts, Programs(), known)
    assert runner.implementation.name == "mosaic_gpu"
    return Engine(
        SequenceRunner(runner, max_tokens=LONGEST, max_rows=4),
        config=EngineConfig(steps_per_launch=steps),
    )


def by_numpy(prompt, count):
    """Returns what `digest` makes of a prompt; it adds more to one logit than the model's logits differ by."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(processed(np.zeros(VOCAB), CALLS, tokens, len(prompt)).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("steps", [1, 4])
def test_tokens_of_processors_on_our_kernels_are_those_of_numpy(steps):
    engine, draw = engine_of(steps), np.random.default_rng(steps)
    made = []
    for length in (1, 15, 64, 130):
        prompt = tuple(draw.integers(0, VOCAB, length).tolist())
        for wish in (CALLS, {}):
            params = SamplingParams(temperature=0.0, max_tokens=40, logits_processors=wish)
            request = Request(prompt=prompt, params=params, seed=0, stop_ids=())
            made += engine.add([request])
    engine.run(made)
    # Every other request has no processors.
    for sequence in made[::2]:
        assert sequence.token_ids == by_numpy(sequence.request.prompt, 40)

"""State checkpoints on a GPU: snapshots and read ids of the kernels inside the engine, in bfloat16."""

import jax
import numpy as np
import pytest

from jaxkv.config.blocks import MambaConfig
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.models.decoder import Decoder
from tests.engine.engines import VOCAB, assert_idle
from tests.engine.hybrid import engine_of, places, run, texts, uncached

pytestmark = pytest.mark.gpu

# How far log-probabilities of a bfloat16 model may be from themselves, however a text is cut.
CLOSE = 0.1


@pytest.fixture(scope="module")
def engine():
    model = Decoder(
        ModelConfig(
            family="hybrid",
            vocab_size=VOCAB,
            hidden_size=256,
            num_layers=3,
            heads=8,
            kv_heads=2,
            head_dim=64,
            ffn_size=512,
            max_positions=1024,
            rope=RopeConfig(rotary_dim=64),
            windows=(None,) * 3,
            pattern=(("mamba2", "gated"), ("attention", "gated"), ("mamba2+attention", "gated")),
            mamba=MambaConfig(heads=8, head_dim=64, d_state=128, d_conv=4, groups=1, chunk_size=64),
        )
    )
    params = model.init_params(jax.random.key(1), "bfloat16")
    params = jax.tree.map(
        lambda leaf: leaf * 4 if leaf.ndim == 2 and len(leaf) > 4 else leaf, params
    )
    made = engine_of(
        network=(model, params),
        dtype="bfloat16",
        page=16,
        longest=512,
        budget=256,
        tokens=256,
        policy=CheckpointPolicy(),
        full_hits=True,
    )
    made.prefix.clear()
    return made


def states_of(engine, prompt, length, salt):
    """Returns what a checkpoint of a prompt holds, by layer and role."""
    assert length in places(engine, prompt, salt)
    found = engine.prefix.match([*prompt[:length], 0], engine.prefix.keys(salt))
    live, group = engine.runner.owner.handle().cache, engine.runner.layout.group("mamba2")
    return {
        (layer, array.role): np.asarray(live.layer(layer)[array.role][found.states["mamba2"]])
        for layer in group.layers
        for array in group.spec.arrays
    }


def assert_close(made, truth):
    """Each token is as likely as in the other run, up to the first that is another because two were nearly equal."""
    compared = 0
    for one, other in zip(made, truth, strict=True):
        for token, got, wanted, want in zip(
            one.token_ids, one.logprobs, other.token_ids, other.logprobs, strict=True
        ):
            if token != wanted:
                assert want[wanted] - want.get(token, -np.inf) < CLOSE
                break
            assert abs(got[token] - want[token]) < CLOSE
            compared += 1
    assert compared > 4 * len(made)


def test_prompts_that_begin_from_kept_states_are_answered_as_if_all_were_computed(engine):
    # A further turn, a branch, a repeat that computes nothing, and all of them at once.
    assert engine.runner.implementation.name == "mosaic_gpu"
    base, more, other = texts(1, 200, 30, 70)
    [first] = run(engine, base, max_tokens=12, logprobs=2)
    turn, branch = first.tokens + more, base[:150] + other
    # The first to branch off leaves a checkpoint where it did.
    run(engine, base[:150] + more)
    made = [run(engine, prompt, max_tokens=12, logprobs=2)[0] for prompt in (turn, branch, base)]
    assert [one.cached for one in made] == [211, 128, 200]
    together = run(engine, turn, branch, base, max_tokens=12, logprobs=2)
    assert min(one.cached for one in together) >= 128
    truth = uncached(engine, turn, branch, base, max_tokens=12, logprobs=2)
    assert_close(made, truth)
    assert_close(together, truth)
    assert_idle(engine)


def test_a_snapshot_is_the_state_of_a_run_that_ends_there(engine):
    # Taken within a step of 200 tokens, and at the end of one of 192. The first layer's states have the same bits.
    (prompt,) = texts(2, 200)
    run(engine, prompt, salt="through", max_tokens=1)
    run(engine, prompt[:192], salt="ends", max_tokens=1)
    through = states_of(engine, prompt, 192, "through")
    ends = states_of(engine, prompt[:192], 192, "ends")
    for place, wanted in ends.items():
        assert wanted.any()
        if place[0] == 0:
            np.testing.assert_array_equal(through[place], wanted)
        else:
            scale = np.max(np.abs(wanted.astype(np.float32)))
            error = np.abs(through[place].astype(np.float32) - wanted.astype(np.float32))
            assert np.max(error) < 0.02 * scale

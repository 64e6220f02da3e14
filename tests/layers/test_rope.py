"""Frequencies, angles and rotation against Transformers; rows are independent of each other."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.model import RopeConfig
from jaxkv.layers.rope import FREQUENCIES, attention_factor, rope_angles, rotate

LLAMA_3_1 = RopeConfig(
    theta=500000.0,
    rotary_dim=128,
    kind="llama3",
    factor=8.0,
    original_max_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
QWEN_2_5_LONG = RopeConfig(
    theta=1000000.0, rotary_dim=128, kind="yarn", factor=4.0, original_max_positions=32768
)
ROPES = {
    "default": RopeConfig(theta=10000.0, rotary_dim=24),
    "linear": RopeConfig(theta=10000.0, rotary_dim=24, kind="linear", factor=4.0),
    "dynamic": RopeConfig(rotary_dim=24, kind="dynamic", factor=4.0, original_max_positions=32),
    "llama3": LLAMA_3_1,
    "yarn": QWEN_2_5_LONG,
    "yarn-mscale": dataclasses.replace(
        QWEN_2_5_LONG, mscale=0.7, mscale_all_dim=1.4, beta_fast=16.0, beta_slow=2.0, truncate=False
    ),
    "yarn-given-factor": dataclasses.replace(QWEN_2_5_LONG, attention_factor=0.9),
    "yarn-within-one-component": dataclasses.replace(
        QWEN_2_5_LONG, beta_fast=1e-5, beta_slow=1e-6, original_max_positions=64
    ),
}
DYNAMIC = ROPES["dynamic"]


def theirs(rope, max_positions):
    """Transformers' rotary module of the same description."""
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    keys = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        keys["factor"] = rope.factor
    if rope.kind == "llama3":
        keys |= {"low_freq_factor": rope.low_freq_factor}
        keys |= {"high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale")
        keys |= {name: getattr(rope, name) for name in (*names, "mscale_all_dim")}
    if rope.kind in ("llama3", "yarn"):
        keys["original_max_position_embeddings"] = rope.original_max_positions
    config = transformers.LlamaConfig(
        head_dim=rope.rotary_dim, max_position_embeddings=max_positions, rope_parameters=keys
    )
    return llama.LlamaRotaryEmbedding(config)


def angles_of(rope, positions, visible=None):
    positions = jnp.asarray(positions, jnp.int32)
    visible = positions + 1 if visible is None else jnp.asarray(visible, jnp.int32)
    return rope_angles(rope, positions, visible)


@pytest.mark.torch
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers_to_the_last_bits(name):
    rope = ROPES[name]
    module = theirs(rope, 131072 if rope.rotary_dim == 128 else 32)
    got = FREQUENCIES[rope.kind](rope)
    assert got.dtype == np.float32
    np.testing.assert_array_max_ulp(got, module.inv_freq.numpy(), maxulp=4)
    assert attention_factor(rope) == pytest.approx(module.attention_scaling, rel=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("length", [20, 32, 33, 100])
def test_dynamic_angles_equal_transformers_below_and_beyond_the_original_context(length):
    torch = pytest.importorskip("torch")
    module = theirs(DYNAMIC, 32)
    cos, sin = module(torch.zeros(1), torch.arange(length)[None])
    got = angles_of(DYNAMIC, np.arange(length), np.full(length, length))
    half = DYNAMIC.rotary_dim // 2
    np.testing.assert_allclose(got[0], cos[0, :, :half], atol=2e-5)
    np.testing.assert_allclose(got[1], sin[0, :, :half], atol=2e-5)


def test_dynamic_angles_depend_on_the_tokens_own_row_alone():
    # The second token's row is far longer, which must not change the first token.
    alone = angles_of(DYNAMIC, [30], [31])
    beside = angles_of(DYNAMIC, [30, 500], [31, 501])
    long = angles_of(DYNAMIC, [30], [501])
    np.testing.assert_array_equal(alone[0][0], beside[0][0])
    assert np.max(np.abs(alone[0] - long[0])) > 0.1


def test_padding_tokens_have_finite_angles():
    for rope in ROPES.values():
        cos, sin = angles_of(rope, [0, 0], [0, 5])
        assert np.all(np.isfinite(cos))
        assert np.all(np.isfinite(sin))


def test_rotation_pairs_component_i_with_i_plus_half_and_leaves_the_rest():
    rope = RopeConfig(theta=10000.0, rotary_dim=4)
    angles = angles_of(rope, [3])
    x = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 6)
    got = np.asarray(rotate(angles, jnp.asarray(x)))[0, 0]
    for first, angle in ((0, 3.0), (1, 3.0 / 100)):
        a, b = x[0, 0, first], x[0, 0, first + 2]
        assert got[first] == pytest.approx(a * np.cos(angle) - b * np.sin(angle), abs=1e-5)
        assert got[first + 2] == pytest.approx(b * np.cos(angle) + a * np.sin(angle), abs=1e-5)
    np.testing.assert_array_equal(got[4:], x[0, 0, 4:])


def test_rotation_keeps_the_dtype_and_rounds_once():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 24)), jnp.bfloat16)
    angles = angles_of(ROPES["default"], np.arange(5))
    got = rotate(angles, x)
    assert got.dtype == jnp.bfloat16
    exact = rotate(angles, x.astype(jnp.float32))
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))

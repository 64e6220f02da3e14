"""Rotary position embedding: the angles of one step's tokens, and turning queries and keys by them.

Frequencies are constants computed on the host in float32, operation by operation as Hugging Face does, because
a last-bit difference in a frequency grows with the position.
"""

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.config.model import RopeConfig

Angles = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]
"""Cosine and sine of each token's angle for each pair of components."""


def rope_angles(
    rope: RopeConfig, positions: Int[Array, " tokens"], visible: Int[Array, " tokens"]
) -> Angles:
    """Computes every token's cosines and sines, once per step for all layers.

    Args:
        rope: which frequencies.
        positions: each token's position in its sequence.
        visible: tokens of the token's own sequence after this step; only "dynamic" looks at it.
    """
    frequencies = jnp.asarray(FREQUENCIES[rope.kind](rope))[None, :]
    if rope.kind == "dynamic":
        frequencies = frequencies * _dynamic_shrink(rope, visible)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    scale = attention_factor(rope)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    angles: Angles, x: Float[Array, "tokens heads head_dim"]
) -> Float[Array, "tokens heads head_dim"]:
    """Turns component i with component i + rotary_dim / 2 (Hugging Face's layout) in float32.

    Components past the angles' width are left as they are.
    """
    cos, sin = (part[:, None, :] for part in angles)
    half = cos.shape[-1]
    wide = x[..., : 2 * half].astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return jnp.concatenate((turned.astype(x.dtype), x[..., 2 * half :]), axis=-1)


def rotate_pairs(
    angles: Angles, x: Float[Array, "tokens heads rotary_dim"]
) -> Float[Array, "tokens heads rotary_dim"]:
    """Turns component 2i with component 2i + 1 (DeepSeek's layout) in float32; all firsts come out before all seconds.

    Queries and keys that are both laid out anew have the products that they had before.
    """
    cos, sin = (part[:, None, :] for part in angles)
    wide = x.astype(jnp.float32)
    first, second = wide[..., 0::2], wide[..., 1::2]
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)


def attention_factor(rope: RopeConfig) -> float:
    """Returns what cosines and sines are multiplied by: yarn sharpens attention as the context is stretched."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Returns how much sharper yarn makes attention for a context stretched `factor` times."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _periods(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    """Returns theta ** (2i / rotary_dim), the reciprocals of the unstretched frequencies."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    return np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)


def _plain(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    return np.float32(1) / _periods(rope)


def _linear(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    return _plain(rope) / np.float32(rope.factor)


def _llama3(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    """Stretches waves too long for the original context, keeps short ones, and blends those between."""
    assert rope.original_max_positions is not None
    frequencies, factor = _plain(rope), np.float32(rope.factor)
    waves = np.float32(2 * math.pi) / frequencies
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    keep = np.clip((np.float32(rope.original_max_positions) / waves - low) / (high - low), 0, 1)
    return (1 - keep) * frequencies / factor + keep * frequencies


def _yarn(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    """Stretches components that turn rarely within the original context, keeps fast ones, ramps between."""
    low, high = (_yarn_component(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    # Equal ends would divide by zero; any small width gives the step that is meant.
    width = np.float32(high - low if high != low else 0.001)
    component = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    keep = 1 - np.clip((component - np.float32(low)) / width, 0, 1)
    periods = _periods(rope)
    stretched = np.float32(1) / (np.float32(rope.factor) * periods)
    return stretched * (1 - keep) + np.float32(1) / periods * keep


def _yarn_component(rope: RopeConfig, turns: float) -> float:
    """Returns the (fractional) component that turns this many times within the original context."""
    assert rope.original_max_positions is not None
    wave = rope.original_max_positions / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))


def _none(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    return np.zeros(rope.rotary_dim // 2, np.float32)


FREQUENCIES: Mapping[str, Callable[[RopeConfig], Float[np.ndarray, " half"]]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,
    "llama3": _llama3,
    "yarn": _yarn,
    "none": _none,
}


def _dynamic_shrink(
    rope: RopeConfig, visible: Int[Array, " tokens"]
) -> Float[Array, "tokens half"]:
    """Returns what the frequencies of each token shrink by: theta grows with the length of its own sequence."""
    assert rope.original_max_positions is not None
    original = float(rope.original_max_positions)
    length = jnp.maximum(visible.astype(jnp.float32), original)
    growth = rope.factor * length / original - (rope.factor - 1)
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim - 2)
    return jnp.exp(-jnp.log(growth)[:, None] * jnp.asarray(exponents)[None, :])

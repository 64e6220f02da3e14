"""Rotary position embedding: the angles of one step's tokens, and the rotation of queries and keys.

Frequencies are constants, computed on the host in float32 with the same operations as Hugging Face, because the effect
of a last-bit difference in a frequency grows with the position.
"""

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.config.blocks import QueryGrowth
from jaxkv.config.model import RopeConfig

Angles = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]
"""Cosines and sines of each token's angles, float32 [tokens, rotary_dim / 2] each."""


def rope_angles(
    rope: RopeConfig, positions: Int[Array, " tokens"], visible: Int[Array, " tokens"]
) -> Angles:
    """Returns every token's cosines and sines, for all layers of a step.

    Args:
        rope: the rotary embedding.
        positions: each token's position in its sequence.
        visible: length of each token's sequence after this step; only the kinds "dynamic" and "longrope" use it.
    """
    frequencies = jnp.asarray(FREQUENCIES[rope.kind](rope))[None, :]
    if rope.kind == "dynamic":
        frequencies = frequencies * _dynamic_shrink(rope, visible)
    if rope.kind == "longrope":
        assert rope.original_max_positions is not None, "the config was checked when it was made"
        is_long = visible[:, None] > rope.original_max_positions
        frequencies = jnp.where(is_long, jnp.asarray(_long(rope))[None, :], frequencies)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    scale = attention_factor(rope)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    angles: Angles, x: Float[Array, "tokens heads head_dim"]
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates the pairs of components (i, i + rotary_dim / 2) (Hugging Face's layout) in float32.

    Components from rotary_dim on are unchanged.
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
    """Rotates the pairs of components (2i, 2i + 1) (DeepSeek's layout) in float32.

    The result has all first components before all second ones. Queries and keys are permuted in the same way, so their
    products do not change.
    """
    cos, sin = (part[:, None, :] for part in angles)
    wide = x.astype(jnp.float32)
    first, second = wide[..., 0::2], wide[..., 1::2]
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)


def grow(
    queries: Float[Array, "tokens heads head_dim"],
    positions: Int[Array, " tokens"],
    growth: QueryGrowth,
) -> Float[Array, "tokens heads head_dim"]:
    """Returns queries times the factor of their position, see `QueryGrowth`."""
    factor = 1 + growth.beta * jnp.log1p((positions // growth.length).astype(jnp.float32))
    return (queries.astype(jnp.float32) * factor[:, None, None]).astype(queries.dtype)


def attention_factor(rope: RopeConfig) -> float:
    """Returns the factor of cosines and sines: YaRN and LongRoPE increase it with the scaling of the context."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        assert rope.original_max_positions is not None
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Returns YaRN's mscale for a context scaled by `factor`: `0.1 * weight * log(factor) + 1`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _periods(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    """Returns theta ** (2i / rotary_dim), the reciprocals of the unscaled frequencies."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    return np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)


def _plain(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    return np.float32(1) / _periods(rope)


def _linear(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    return _plain(rope) / np.float32(rope.factor)


def _llama3(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    """Scales wavelengths too long for the original context, keeps short ones, and interpolates between them."""
    assert rope.original_max_positions is not None
    frequencies, factor = _plain(rope), np.float32(rope.factor)
    waves = np.float32(2 * math.pi) / frequencies
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    keep = np.clip((np.float32(rope.original_max_positions) / waves - low) / (high - low), 0, 1)
    return (1 - keep) * frequencies / factor + keep * frequencies


def _yarn(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    """Scales components with few rotations within the original context, keeps fast ones, interpolates between them."""
    low, high = (_yarn_component(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    # If both ends are equal, a small width avoids a division by zero and gives a step function.
    width = np.float32(high - low if high != low else 0.001)
    component = np.arange(rope.rotary_dim // 2, dtype=np.float32)
    keep = 1 - np.clip((component - np.float32(low)) / width, 0, 1)
    periods = _periods(rope)
    scaled = np.float32(1) / (np.float32(rope.factor) * periods)
    return scaled * (1 - keep) + np.float32(1) / periods * keep


def _yarn_component(rope: RopeConfig, turns: float) -> float:
    """Returns the (fractional) index of the component with `turns` rotations within the original context."""
    assert rope.original_max_positions is not None
    wave = rope.original_max_positions / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))


def _short(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    return np.float32(1) / (np.array(rope.short_factors, np.float32) * _periods(rope))


def _long(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    return np.float32(1) / (np.array(rope.long_factors, np.float32) * _periods(rope))


def _proportional(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    """Divides by the factor, and stops all pairs behind the first `turning` ones."""
    turns = np.arange(rope.rotary_dim // 2) < rope.turning
    return np.where(turns, _linear(rope), np.float32(0))


def _none(rope: RopeConfig) -> Float[np.ndarray, " half"]:
    return np.zeros(rope.rotary_dim // 2, np.float32)


FREQUENCIES: Mapping[str, Callable[[RopeConfig], Float[np.ndarray, " half"]]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _short,
    "proportional": _proportional,
    "none": _none,
}


def _dynamic_shrink(
    rope: RopeConfig, visible: Int[Array, " tokens"]
) -> Float[Array, "tokens half"]:
    """Returns the factor of each token's frequencies: theta grows with the length of the token's sequence."""
    assert rope.original_max_positions is not None
    original = float(rope.original_max_positions)
    length = jnp.maximum(visible.astype(jnp.float32), original)
    growth = rope.factor * length / original - (rope.factor - 1)
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim - 2)
    return jnp.exp(-jnp.log(growth)[:, None] * jnp.asarray(exponents)[None, :])

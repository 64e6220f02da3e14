"""RMS normalisation (Zhang and Sennrich), layer normalisation and gated norms, rounded where Hugging Face rounds."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.layers.shards import Shards
from pallas_kernels.fixed_order import sum_of_last


def rms_norm(
    weight: Float[Array, " width"],
    x: Float[Array, "*rows width"],
    *,
    eps: float,
) -> Float[Array, "*rows width"]:
    """Scales rows to unit root mean square in float32, casts to the dtype of `x`, then multiplies by the weight.

    If the weight's dtype differs from that of `x`, the multiplication is in float32, before the cast.
    """
    [normed] = rms_norms([(weight, x)], eps=eps)
    return normed


def rms_norms(
    pairs: Sequence[tuple[Float[Array, " _"], Float[Array, "*rows _"]]],
    *,
    eps: float,
    shards: Shards | None = None,
) -> list[Float[Array, "*rows _"]]:
    """Returns `rms_norm` of several pairs of a weight and an array; the arrays have the same rows, of any widths.

    `shards` are the devices that have equal parts of each row, with one sum over them for all arrays; `None` for whole
    rows.
    """
    means = [_mean(jnp.square(x.astype(jnp.float32))) for _, x in pairs]
    if shards is not None:
        means = jnp.split(shards.mean(jnp.concatenate(means, axis=-1)), len(pairs), axis=-1)
    return [_scaled(*pair, mean, eps) for pair, mean in zip(pairs, means, strict=True)]


def _scaled(
    weight: Float[Array, " size"],
    x: Float[Array, "*rows size"],
    mean_square: Float[Array, "*rows 1"],
    eps: float,
) -> Float[Array, "*rows size"]:
    unit = x.astype(jnp.float32) * jax.lax.rsqrt(mean_square + eps)
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    if weight.dtype == x.dtype:
        return unit.astype(x.dtype) * weight
    return (unit * weight.astype(jnp.float32)).astype(x.dtype)


def layer_norm(
    weight: Float[Array, " width"],
    bias: Float[Array, " width"] | None,
    x: Float[Array, "*rows width"],
    *,
    eps: float,
) -> Float[Array, "*rows width"]:
    """Scales rows to zero mean and unit variance (Ba et al.), times weight plus any bias, computed in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - _mean(wide)
    variance = _mean(jnp.square(centred))
    unit = centred * jax.lax.rsqrt(variance + eps)
    leading = (1,) * (x.ndim - 1)
    weight = weight.astype(jnp.float32).reshape(leading + weight.shape)
    if bias is None:
        return (unit * weight).astype(x.dtype)
    bias = bias.astype(jnp.float32).reshape(leading + bias.shape)
    return (unit * weight + bias).astype(x.dtype)


def gated_group_norm(
    weight: Float[Array, " width"],
    x: Float[Array, "rows width"],
    gate: Float[Array, "rows width"],
    *,
    groups: int,
    gate_first: bool,
    eps: float,
    activation: Callable[[Array], Array] = jax.nn.silu,
    shards: Shards | None = None,
) -> Float[Array, "rows width"]:
    """Multiplies by a gate and scales each group of components to unit RMS, in float32 (Mamba-2's output norm).

    Args:
        weight: weight of each component.
        x: output of the state-space part.
        gate: the gate before its activation.
        groups: number of equal groups of components, each normalised separately.
        gate_first: apply the gate before norm and weight; otherwise after them.
        eps: added to the mean square.
        activation: the gate's activation.
        shards: the devices that have equal parts of each group; `None` for whole groups.
    """
    gate, wide = activation(gate.astype(jnp.float32)), x.astype(jnp.float32)
    wide = wide * gate if gate_first else wide
    grouped = wide.reshape(x.shape[0], groups, -1)
    mean_square = _mean(jnp.square(grouped), shards)
    wide = (grouped * jax.lax.rsqrt(mean_square + eps)).reshape(x.shape)
    wide = wide * weight.astype(jnp.float32)[None]
    return (wide if gate_first else wide * gate).astype(x.dtype)


def _mean(x: Float[Array, "*rows width"], shards: Shards | None = None) -> Float[Array, "*rows 1"]:
    own = sum_of_last(x) / x.shape[-1]
    return own if shards is None else shards.mean(own)

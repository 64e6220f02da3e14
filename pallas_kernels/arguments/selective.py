"""Arguments that `selective_scan` and `selective_update` share: checks, and each token's inputs to the recurrence.

The recurrence is that of Mamba (Gu and Dao, arXiv:2312.00752): every channel has a state of its own with its own decay
rates, unlike Mamba-2, where all components of a head decay alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.arguments.checks import check_shape
from pallas_kernels.arguments.states import check_floats
from pallas_kernels.fixed_order import sum_of_last


class SelectiveArrays(NamedTuple):
    """The arrays of one layer, as the ops' `api.py` describes them."""

    a_log: Float[Array, "channels d_state"]
    skip: Float[Array, " channels"]
    dt_bias: Float[Array, " channels"]
    states: Float[Array, "states channels d_state"]
    x: Float[Array, "tokens channels"]
    dt: Float[Array, "tokens channels"]
    b: Float[Array, "tokens d_state"]
    c: Float[Array, "tokens d_state"]


class SelectiveTokens(NamedTuple):
    """Each token's inputs to the recurrence, in float32.

    Attributes:
        x: inputs of the channels.
        step: step sizes of the channels, after bias and softplus; 0 leaves a state unchanged.
        b: how much of a channel's input each component of its state takes.
        c: how much of each component of a channel's state its output takes.
    """

    x: Float[Array, "... channels"]
    step: Float[Array, "... channels"]
    b: Float[Array, "... d_state"]
    c: Float[Array, "... d_state"]


def tokens_of(layer: SelectiveArrays) -> SelectiveTokens:
    """Returns the tokens' inputs, with the step sizes computed."""
    x, dt, b, c = (part.astype(jnp.float32) for part in layer[4:])
    return SelectiveTokens(x, jax.nn.softplus(dt + layer.dt_bias.astype(jnp.float32)[None]), b, c)


def rates_of(a_log: Float[Array, "channels d_state"]) -> Float[Array, "channels d_state"]:
    """Returns the decay rates, which are negative."""
    return -jnp.exp(a_log.astype(jnp.float32))


def advance(
    state: Float[Array, "rows channels d_state"],
    token: SelectiveTokens,
    rates: Float[Array, "channels d_state"],
) -> Float[Array, "rows channels d_state"]:
    """Returns the state after one token."""
    decay = jnp.exp(token.step[:, :, None] * rates[None])
    return decay * state + (token.step * token.x)[:, :, None] * token.b[:, None, :]


def output(
    state: Float[Array, "rows channels d_state"],
    token: SelectiveTokens,
    skip: Float[Array, " channels"],
) -> Float[Array, "rows channels"]:
    """Returns the output of a token, given the state after it."""
    read = sum_of_last(state * token.c[:, None, :])[..., 0]
    return read + skip.astype(jnp.float32)[None] * token.x


def check_selective(
    a_log: Array | np.ndarray,
    skip: Array | np.ndarray,
    dt_bias: Array | np.ndarray,
    states: Array,
    x: Array | np.ndarray,
    dt: Array | np.ndarray,
    b: Array | np.ndarray,
    c: Array | np.ndarray,
) -> None:
    """Raises `ValueError` for arrays of one layer that do not fit each other."""
    check_floats(a_log=a_log, skip=skip, dt_bias=dt_bias, states=states, x=x, dt=dt, b=b, c=c)
    _, channels, d_state = states.shape
    check_shape("a_log", a_log, (channels, d_state))
    for name, vector in (("skip", skip), ("dt_bias", dt_bias)):
        check_shape(name, vector, (channels,))
    tokens = x.shape[0]
    for name, part, width in (
        ("x", x, channels),
        ("dt", dt, channels),
        ("b", b, d_state),
        ("c", c, d_state),
    ):
        check_shape(name, part, (tokens, width))

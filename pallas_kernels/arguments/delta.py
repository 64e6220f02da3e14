"""Arguments that `delta_scan` and `delta_update` share: sizes, checks, and each token's inputs to the recurrence.

The recurrence is Gated DeltaNet (Yang et al., arXiv:2412.06464), as in Qwen3-Next, or Kimi Delta Attention (Kimi Team,
arXiv:2510.26692), where each component of a key has a decay of its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.arguments.checks import check_shape
from pallas_kernels.arguments.states import check_floats
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.families import CHANNEL_DECAYS
from pallas_kernels.fixed_order import sum_of_last

NORM_EPS = 1e-6
"""Added to the sum of squares by which queries and keys are normalised."""


class DeltaArrays(NamedTuple):
    """The arrays of one layer, described in the ops' `api.py`; a token of `delta_update` is its row."""

    a_log: Float[Array, " heads"]
    dt_bias: Float[Array, " decays"]
    states: Float[Array, "states heads key_dim value_dim"]
    qkv: Float[Array, "tokens wide"]
    a: Float[Array, "tokens decays"]
    b: Float[Array, "tokens heads"]

    def refusal(self) -> str | None:
        """Returns why no kernel takes these arrays; `None` if kernels may."""
        return CHANNEL_DECAYS if self.dt_bias.shape != self.a_log.shape else None


class DeltaSizes(NamedTuple):
    """Sizes of one layer.

    Attributes:
        key_heads: heads of queries and keys; divides `heads`. Key head i serves the value heads from
            `i * heads // key_heads` on, `heads // key_heads` of them.
        heads: heads of values.
        key_dim: components of a key.
        value_dim: components of a value.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, states: ArrayOrStruct, qkv: ArrayOrStruct) -> "DeltaSizes":
        """Returns the sizes of a layer from its state pool and packed projections."""
        _, heads, key_dim, value_dim = states.shape
        return cls((qkv.shape[1] - heads * value_dim) // (2 * key_dim), heads, key_dim, value_dim)


class Tokens(NamedTuple):
    """Each token's inputs to the recurrence, per value head, in float32.

    Attributes:
        q: queries, L2-normalised and scaled by `key_dim ** -0.5`.
        k: keys, L2-normalised.
        v: values.
        decay: logarithm of the factor by which the state decays at the token; `channels` is 1, or `key_dim` if each
            row of the state, which belongs to a component of keys, has its own.
        beta: strength of the delta rule's correction, in (0, 1).
    """

    q: Float[Array, "tokens heads key_dim"]
    k: Float[Array, "tokens heads key_dim"]
    v: Float[Array, "tokens heads value_dim"]
    decay: Float[Array, "tokens heads channels"]
    beta: Float[Array, "tokens heads"]


def tokens_of(
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " decays"],
    qkv: Float[Array, "tokens wide"],
    a: Float[Array, "tokens decays"],
    b: Float[Array, "tokens heads"],
    sizes: DeltaSizes,
) -> Tokens:
    """Splits qkv into normalised queries and keys, and values, and computes the gates."""
    keys = sizes.key_heads * sizes.key_dim
    q, k, v = jnp.split(qkv.astype(jnp.float32), (keys, 2 * keys), axis=1)
    repeats = sizes.heads // sizes.key_heads
    q, k = (
        jnp.repeat(_unit(part.reshape(-1, sizes.key_heads, sizes.key_dim)), repeats, axis=1)
        for part in (q, k)
    )
    decay, beta = gates_of(a_log, dt_bias, a, b)
    return Tokens(
        q=q * sizes.key_dim**-0.5,
        k=k,
        v=v.reshape(-1, sizes.heads, sizes.value_dim),
        decay=decay,
        beta=beta,
    )


def gates_of(
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " decays"],
    a: Float[Array, "tokens decays"],
    b: Float[Array, "tokens heads"],
) -> tuple[Float[Array, "tokens heads channels"], Float[Array, "tokens heads"]]:
    """Returns each token's log decay and beta in float32, as in `Tokens`."""
    step = jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32)[None])
    by_head = step.reshape(len(a), len(a_log), -1 if len(a_log) else 1)
    decay = -jnp.exp(a_log.astype(jnp.float32))[None, :, None] * by_head
    return decay, jax.nn.sigmoid(b.astype(jnp.float32))


def _unit(x: Float[Array, "tokens heads dim"]) -> Float[Array, "tokens heads dim"]:
    return x * jax.lax.rsqrt(sum_of_last(jnp.square(x)) + NORM_EPS)


def check_delta(
    a_log: Array | np.ndarray,
    dt_bias: Array | np.ndarray,
    states: Array,
    qkv: Array | np.ndarray,
    a: Array | np.ndarray,
    b: Array | np.ndarray,
) -> None:
    """Raises `ValueError` for arrays of one layer that do not fit each other."""
    check_floats(a_log=a_log, dt_bias=dt_bias, states=states, qkv=qkv, a=a, b=b)
    sizes = DeltaSizes.of(states, qkv)
    values = sizes.heads * sizes.value_dim
    wide = 2 * sizes.key_heads * sizes.key_dim + values
    if sizes.key_heads < 1 or sizes.heads % sizes.key_heads or wide != qkv.shape[1]:
        raise ValueError(
            f"qkv has {qkv.shape[1]} columns, of which {values} are the values of {sizes.heads} heads; the others must "
            f"be queries and keys of {sizes.key_dim} components each, for a number of heads that divides {sizes.heads}"
        )
    check_shape("a_log", a_log, (sizes.heads,))
    each = sizes.heads * (sizes.key_dim if len(dt_bias) != sizes.heads else 1)
    check_shape("dt_bias", dt_bias, (each,))
    check_shape("a", a, (qkv.shape[0], each))
    check_shape("b", b, (qkv.shape[0], sizes.heads))

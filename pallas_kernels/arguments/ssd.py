"""Arguments that the Mamba-2 ops share: sizes, checks, discretisation steps, and the output gate."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.arguments.checks import check_shape
from pallas_kernels.arguments.states import check_floats
from pallas_kernels.arrays import ArrayOrStruct


class SsdArrays(NamedTuple):
    """The arrays of one layer, described in the ops' `api.py`; a token of `ssd_update` is its row."""

    a_log: Float[Array, " heads"]
    d: Float[Array, " heads"]
    dt_bias: Float[Array, " heads"]
    states: Float[Array, "states heads head_dim d_state"]
    xbc: Float[Array, "tokens wide"]
    dt: Float[Array, "tokens heads"]


class Sizes(NamedTuple):
    """Sizes of one layer.

    Attributes:
        heads: heads of x.
        head_dim: components of a head of x.
        d_state: components of B and C.
        groups: number of distinct B and C. Group g serves the heads from `g * heads // groups` on,
            `heads // groups` of them.
    """

    heads: int
    head_dim: int
    d_state: int
    groups: int

    @classmethod
    def of(cls, states: ArrayOrStruct, xbc: ArrayOrStruct) -> "Sizes":
        """Returns the sizes of a layer from its state pool and packed projections."""
        _, heads, head_dim, d_state = states.shape
        return cls(heads, head_dim, d_state, (xbc.shape[1] - heads * head_dim) // (2 * d_state))

    @property
    def d_inner(self) -> int:
        """Number of columns of x, and so the first column of B."""
        return self.heads * self.head_dim

    @property
    def first_c(self) -> int:
        """First column of C."""
        return self.d_inner + self.groups * self.d_state

    def split(
        self, xbc: Float[Array, "tokens wide"]
    ) -> tuple[
        Float[Array, "tokens heads head_dim"],
        Float[Array, "tokens groups d_state"],
        Float[Array, "tokens groups d_state"],
    ]:
        """Splits the packed projections into x, B and C."""
        x, b, c = jnp.split(xbc, (self.d_inner, self.first_c), axis=1)
        shape = (len(xbc), self.groups, self.d_state)
        return x.reshape(len(xbc), self.heads, self.head_dim), b.reshape(shape), c.reshape(shape)


def steps(
    dt: Float[Array, "tokens heads"],
    dt_bias: Float[Array, " heads"],
    dt_limits: tuple[float, float],
) -> Float[Array, "tokens heads"]:
    """Returns each token's discretisation step, softplus(dt + dt_bias) clamped to `dt_limits`, in float32."""
    wide = dt.astype(jnp.float32) + dt_bias.astype(jnp.float32)[None]
    return jnp.clip(jax.nn.softplus(wide), *dt_limits)


def rates(a_log: Float[Array, " heads"]) -> Float[Array, " heads"]:
    """Returns A = -exp(a_log) in float32: a step dt multiplies the state by exp(dt * A)."""
    return -jnp.exp(a_log.astype(jnp.float32))


def finish(
    out: Float[Array, "tokens heads head_dim"],
    x: Float[Array, "tokens heads head_dim"],
    d: Float[Array, " heads"],
    z: Float[Array, "tokens d_inner"] | None,
) -> Float[Array, "tokens heads head_dim"]:
    """Adds the skip connection `d * x` and multiplies by silu(z), in float32."""
    out += d.astype(jnp.float32)[None, :, None] * x.astype(jnp.float32)
    return out if z is None else out * jax.nn.silu(z.astype(jnp.float32)).reshape(out.shape)


def check_layer(
    a_log: Array | np.ndarray,
    d: Array | np.ndarray,
    dt_bias: Array | np.ndarray,
    states: Array,
    xbc: Array | np.ndarray,
    dt: Array | np.ndarray,
    z: Array | np.ndarray | None,
    dt_limits: tuple[float, float],
) -> None:
    """Raises `ValueError` for arrays and options of one layer that do not fit each other."""
    check_shape("states", states, (None, None, None, None))
    _, heads, head_dim, d_state = states.shape
    check_shape("xbc", xbc, (None, None))
    rest = xbc.shape[1] - heads * head_dim
    groups = rest // (2 * d_state)
    if groups < 1 or rest % (2 * d_state) or heads % groups:
        raise ValueError(
            f"xbc must hold x of {heads} heads of {head_dim}, then B and C of {d_state} for a number "
            f"of groups that divides the heads, got {xbc.shape[1]} columns"
        )
    for name, array in {"a_log": a_log, "d": d, "dt_bias": dt_bias}.items():
        check_shape(name, array, (heads,))
    check_shape("dt", dt, (xbc.shape[0], heads))
    if z is not None:
        check_shape("z", z, (xbc.shape[0], heads * head_dim))
    check_floats(a_log=a_log, d=d, dt_bias=dt_bias, states=states, xbc=xbc, dt=dt, z=z)
    low, high = dt_limits
    if not 0 <= low <= high:
        raise ValueError(f"dt_limits must be (low, high) with 0 <= low <= high, got {dt_limits}")

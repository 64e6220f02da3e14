"""Reference of `ssd_update`: one step of the recurrence per row; all states are read before any is written."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.ssd import Sizes, finish, rates, steps


def ssd_update(
    a_log: Float[Array, " heads"],
    d: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    states: Float[Array, "states heads head_dim d_state"],
    xbc: Float[Array, "rows wide"],
    dt: Float[Array, "rows heads"],
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    *,
    z: Float[Array, "rows d_inner"] | None = None,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Computes in float32."""
    sizes = Sizes.of(states, xbc)
    x, b, c = sizes.split(xbc.astype(jnp.float32))
    step = steps(dt, dt_bias, dt_limits)
    begun = states.at[read_states].get(mode="fill", fill_value=0).astype(jnp.float32)
    group = jnp.arange(sizes.heads) * sizes.groups // sizes.heads

    def visit(pool: Array, now: tuple) -> tuple[Array, Array]:
        state, x, b, c, step, write = now
        kept = jnp.exp(rates(a_log) * step)[:, None, None]
        state = kept * state + step[:, None, None] * x[:, :, None] * b[group][:, None, :]
        out = jnp.sum(state * c[group][:, None, :], axis=-1)
        return pool.at[write].set(state.astype(pool.dtype), mode="drop"), out

    pool, out = jax.lax.scan(visit, states, (begun, x, b, c, step, write_states))
    real = (write_states < len(states))[:, None, None]
    return jnp.where(real, finish(out, x, d, z), 0.0).astype(xbc.dtype), pool

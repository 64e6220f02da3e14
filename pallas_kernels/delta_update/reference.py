"""Reference of `delta_update`: one step of the recurrence per row; all states are read before any is written."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.delta import DeltaSizes, tokens_of


def delta_update(
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " decays"],
    states: Float[Array, "states heads key_dim value_dim"],
    qkv: Float[Array, "rows wide"],
    a: Float[Array, "rows decays"],
    b: Float[Array, "rows heads"],
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
) -> tuple[Float[Array, "rows heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Computes in float32."""
    parts = tokens_of(a_log, dt_bias, qkv, a, b, DeltaSizes.of(states, qkv))
    begun = states.at[read_states].get(mode="fill", fill_value=0).astype(jnp.float32)

    def visit(pool: Array, now: tuple) -> tuple[Array, Array]:
        state, token, write = now
        state *= jnp.exp(token.decay)[..., None]
        known = jnp.sum(state * token.k[..., None], axis=1)
        correction = (token.v - known) * token.beta[:, None]
        state += token.k[..., None] * correction[:, None, :]
        out = jnp.sum(state * token.q[..., None], axis=1)
        return pool.at[write].set(state.astype(pool.dtype), mode="drop"), out

    pool, out = jax.lax.scan(visit, states, (begun, parts, write_states))
    real = (write_states < len(states))[:, None, None]
    return jnp.where(real, out, 0.0).astype(qkv.dtype), pool

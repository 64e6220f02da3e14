"""`delta_update` in plain XLA: gathers the states, updates them and scatters them back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.delta import DeltaArrays, DeltaSizes, tokens_of
from pallas_kernels.packed.states import put_states


def delta_update(
    layer: DeltaArrays,
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
) -> tuple[Float[Array, "rows heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Implements `api.delta_update`."""
    a_log, dt_bias, states, qkv, a, b = layer
    now = tokens_of(a_log, dt_bias, qkv, a, b, DeltaSizes.of(states, qkv))
    begun = states.at[read_states].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    # The barrier orders all reads before the writes. For a single row XLA would otherwise read again after the write,
    # from a copy of the pool.
    begun = jax.lax.optimization_barrier(begun)
    state = begun.astype(jnp.float32) * jnp.exp(now.decay)[..., None]
    known = jnp.sum(state * now.k[..., None], axis=2)
    correction = (now.v - known) * now.beta[..., None]
    state += now.k[..., None] * correction[:, :, None, :]
    out = jnp.sum(state * now.q[..., None], axis=2)
    out = jnp.where((write_states < len(states))[:, None, None], out, 0.0)
    return out.astype(qkv.dtype), put_states(states, write_states, state)

"""`selective_update` in plain XLA: gathers the states, updates them and scatters them back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.selective import SelectiveArrays, advance, output, rates_of, tokens_of
from pallas_kernels.packed.states import put_states


def selective_update(
    layer: SelectiveArrays,
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
) -> tuple[Float[Array, "rows channels"], Float[Array, "states channels d_state"]]:
    """Implements `api.selective_update`."""
    states, now = layer.states, tokens_of(layer)
    begun = states.at[read_states].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    # The barrier orders all reads before the writes. For a single row XLA would otherwise read again after the write,
    # from a copy of the pool.
    begun = jax.lax.optimization_barrier(begun)
    state = advance(begun.astype(jnp.float32), now, rates_of(layer.a_log))
    out = jnp.where((write_states < len(states))[:, None], output(state, now, layer.skip), 0.0)
    return out.astype(layer.x.dtype), put_states(states, write_states, state)

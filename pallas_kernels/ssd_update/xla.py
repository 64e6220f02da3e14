"""`ssd_update` in plain XLA: gathers the states, updates them and scatters them back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.ssd import Sizes, SsdArrays, finish, rates, steps


def ssd_update(
    layer: SsdArrays,
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    *,
    z: Float[Array, "rows d_inner"] | None = None,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Implements `api.ssd_update`."""
    a_log, d, dt_bias, states, xbc, dt = layer
    sizes = Sizes.of(states, xbc)
    num_states = len(states)
    x, b, c = sizes.split(xbc.astype(jnp.float32))
    b, c = (jnp.repeat(part, sizes.heads // sizes.groups, axis=1) for part in (b, c))
    step = steps(dt, dt_bias, dt_limits)
    begun = states.at[read_states].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    # The barrier orders all reads before the writes. For a single row XLA would otherwise read again after the write,
    # from a copy of the pool.
    begun = jax.lax.optimization_barrier(begun)
    kept = jnp.exp(step * rates(a_log)[None])
    state = kept[:, :, None, None] * begun.astype(jnp.float32)
    state += (step[:, :, None] * x)[..., None] * b[:, :, None, :]
    out = finish(jnp.sum(state * c[:, :, None, :], axis=-1), x, d, z)
    real = write_states < num_states
    number = jnp.arange(len(real), dtype=jnp.int32)
    states = states.at[jnp.where(real, write_states, num_states + number)].set(
        state.astype(states.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    return jnp.where(real[:, None, None], out, 0.0).astype(xbc.dtype), states

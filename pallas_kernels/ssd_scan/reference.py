"""Reference of `ssd_scan`: the recurrence as a scan over tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.ssd import Sizes, finish, rates, steps
from pallas_kernels.arguments.states import StateTables
from pallas_kernels.packed.token_scan import scan_tokens


def ssd_scan(
    a_log: Float[Array, " heads"],
    d: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    states: Float[Array, "states heads head_dim d_state"],
    xbc: Float[Array, "tokens wide"],
    dt: Float[Array, "tokens heads"],
    cu_q_lens: Int[Array, " row_bounds"],
    seq_lens: Int[Array, " rows"],
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    snapshot_ends: Int[Array, " snapshots"] | None = None,
    snapshot_states: Int[Array, " snapshots"] | None = None,
    *,
    chunk_size: int,
    z: Float[Array, "tokens d_inner"] | None = None,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Computes in float32; reads all states before it writes any."""
    sizes = Sizes.of(states, xbc)
    x, b, c = sizes.split(xbc.astype(jnp.float32))
    b, c = (jnp.repeat(part, sizes.heads // sizes.groups, axis=1) for part in (b, c))

    def step(state: Array, token: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        x, b, c, size = token
        decay = jnp.exp(rates(a_log) * size)[:, None, None]
        state = decay * state + (size[:, None] * x)[..., None] * b[:, None, :]
        return state, jnp.sum(state * c[:, None, :], axis=-1)

    of_rows = (cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, snapshot_states)
    parts = (x, b, c, steps(dt, dt_bias, dt_limits))
    out, pool = scan_tokens(step, states, parts, StateTables(*of_rows), chunk_size=chunk_size)
    real = jnp.arange(len(xbc), dtype=jnp.int32) < cu_q_lens[-1]
    out = jnp.where(real[:, None, None], finish(out, x, d, z), 0.0)
    return out.astype(xbc.dtype), pool

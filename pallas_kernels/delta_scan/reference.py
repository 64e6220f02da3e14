"""Reference of `delta_scan`: the recurrence as a scan over tokens. `delta_update` is one token of it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.delta import DeltaSizes, Tokens, tokens_of
from pallas_kernels.arguments.states import StateTables
from pallas_kernels.packed.token_scan import scan_tokens


def delta_scan(
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " decays"],
    states: Float[Array, "states heads key_dim value_dim"],
    qkv: Float[Array, "tokens wide"],
    a: Float[Array, "tokens decays"],
    b: Float[Array, "tokens heads"],
    cu_q_lens: Int[Array, " row_bounds"],
    seq_lens: Int[Array, " rows"],
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    snapshot_ends: Int[Array, " snapshots"] | None = None,
    snapshot_states: Int[Array, " snapshots"] | None = None,
    *,
    chunk_size: int,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Computes in float32; reads all states before it writes any."""

    def step(state: Array, token: Tokens) -> tuple[Array, Array]:
        state *= jnp.exp(token.decay)[..., None]
        known = jnp.sum(state * token.k[..., None], axis=1)
        correction = (token.v - known) * token.beta[:, None]
        state += token.k[..., None] * correction[:, None, :]
        return state, jnp.sum(state * token.q[..., None], axis=1)

    of_rows = (cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, snapshot_states)
    parts = tokens_of(a_log, dt_bias, qkv, a, b, DeltaSizes.of(states, qkv))
    out, pool = scan_tokens(step, states, parts, StateTables(*of_rows), chunk_size=chunk_size)
    return out.astype(qkv.dtype), pool

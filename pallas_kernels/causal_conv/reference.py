"""Reference of `causal_conv`: a scan over tokens with a sliding window that starts as the row's state."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.packed.rows import rows_of_tokens, snapshots_at


def causal_conv(
    weight: Float[Array, "d_conv channels"],
    bias: Float[Array, " channels"] | None,
    states: Float[Array, "states tail channels"],
    x: Float[Array, "tokens wide"],
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"] | None = None,
    snapshot_ends: Int[Array, " snapshots"] | None = None,
    snapshot_states: Int[Array, " snapshots"] | None = None,
    *,
    first_channel: int = 0,
    activation: str | None = "silu",
) -> tuple[Float[Array, "tokens channels"], Float[Array, "states tail channels"]]:
    """Computes in float32; reads all states before it writes any."""
    tokens, (num_states, tail, channels) = x.shape[0], states.shape
    token = jnp.arange(tokens, dtype=jnp.int32)
    if cu_q_lens is None:
        row, place, real = token, jnp.zeros_like(token), write_states < num_states
        last = real
    else:
        row, place = rows_of_tokens(cu_q_lens, tokens)
        real = place >= 0
        last = real & (token + 1 == cu_q_lens[row + 1])
    ends = jnp.where(last, write_states[row], num_states + token)
    kept = snapshots_at(token + 1, snapshot_ends, snapshot_states, num_states)
    begun = states.at[read_states].get(mode="fill", fill_value=0)
    inputs = x[:, first_channel : first_channel + channels]

    def visit(carry: tuple, now: tuple) -> tuple:
        pool, before = carry
        value, row, place, real, end, kept = now
        before = jnp.where(place == 0, begun[row], before)
        window = jnp.concatenate([before, value[None]])
        total = jnp.sum(weight.astype(jnp.float32) * window.astype(jnp.float32), axis=0)
        total = total if bias is None else total + bias.astype(jnp.float32)
        out = jax.nn.silu(total) if activation == "silu" else total
        pool = pool.at[end].set(window[1:], mode="drop")
        pool = pool.at[jnp.where(real, kept, num_states)].set(window[1:], mode="drop")
        return (pool, window[1:]), jnp.where(real, out, 0.0).astype(x.dtype)

    start = states, jnp.zeros((tail, channels), x.dtype)
    (pool, _), out = jax.lax.scan(visit, start, (inputs, row, place, real, ends, kept))
    return out, pool

"""`selective_scan` in plain XLA: all pieces of chunks at once, token by token, and a loop that carries the state.

A first pass over the tokens of all pieces yields what each piece adds to a state of zeros. A loop over the pieces then
yields the state before each of them, and a second pass its outputs. Nothing of the size tokens * channels * d_state is
stored, and all numbers are sums of products that the recurrence itself has, so no step size can overflow.

Under the fixed order of sums the recurrence runs token by token, so that decode steps are steps of it too.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments.selective import (
    SelectiveArrays,
    SelectiveTokens,
    advance,
    output,
    rates_of,
    tokens_of,
)
from pallas_kernels.arguments.states import StateTables
from pallas_kernels.fixed_order import is_fixed
from pallas_kernels.packed.rows import Pieces, cut, rows_of_tokens
from pallas_kernels.packed.states import by_token, put_pieces
from pallas_kernels.packed.token_scan import scan_tokens

LARGEST_PIECE = 64


def selective_scan(
    layer: SelectiveArrays,
    tables: StateTables,
    *,
    chunk_size: int,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "states channels d_state"]]:
    """Implements `api.selective_scan`."""
    if is_fixed():
        return _by_token(layer, tables, chunk_size=chunk_size)
    states, tokens = layer.states, len(layer.x)
    cu_q_lens = tables.cu_q_lens
    size = max(n for n in range(1, min(chunk_size, LARGEST_PIECE) + 1) if chunk_size % n == 0)
    positions = tables.seq_lens - (cu_q_lens[1:] - cu_q_lens[:-1])
    pieces = cut(cu_q_lens, positions, tokens=tokens, size=size)
    begun = states.at[tables.read_states].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )
    parts = _by_place(tokens_of(layer), pieces, size)
    rates = rates_of(layer.a_log)
    before, after = _carry(parts, rates, pieces, begun.astype(jnp.float32))

    def visit(
        state: Float[Array, "pieces channels d_state"], token: SelectiveTokens
    ) -> tuple[Float[Array, "pieces channels d_state"], Float[Array, "pieces channels"]]:
        state = advance(state, token, rates)
        return state, output(state, token, layer.skip)

    _, out = jax.lax.scan(visit, before, parts)
    row, place = rows_of_tokens(cu_q_lens, tokens)
    out = by_token(out.transpose(1, 0, 2), pieces, row, place, positions)
    out = jnp.where((place >= 0)[:, None], out, 0.0).astype(layer.x.dtype)
    return out, put_pieces(states, after, pieces, tables, chunk_size=chunk_size)


def _by_token(
    layer: SelectiveArrays, tables: StateTables, *, chunk_size: int
) -> tuple[Float[Array, "tokens channels"], Float[Array, "states channels d_state"]]:
    """Computes the recurrence token by token."""
    rates = rates_of(layer.a_log)

    def visit(state: Array, token: SelectiveTokens) -> tuple[Array, Array]:
        row = SelectiveTokens(*(part[None] for part in token))
        state = advance(state[None], row, rates)
        return state[0], output(state, row, layer.skip)[0]

    out, states = scan_tokens(
        visit, layer.states, tokens_of(layer), tables, chunk_size=chunk_size, rounds=True
    )
    return out.astype(layer.x.dtype), states


def _by_place(tokens: SelectiveTokens, pieces: Pieces, size: int) -> SelectiveTokens:
    """Returns the tokens by their place in a piece, [size, pieces, ...], padded with zeros."""
    inside = jnp.arange(size, dtype=jnp.int32)
    real = inside[:, None] < pieces.length[None, :]
    token = jnp.where(real, pieces.start[None, :] + inside[:, None], 0)
    return SelectiveTokens(*(jnp.where(real[..., None], part[token], 0.0) for part in tokens))


def _carry(
    parts: SelectiveTokens,
    rates: Float[Array, "channels d_state"],
    pieces: Pieces,
    begun: Float[Array, "rows channels d_state"],
) -> tuple[Float[Array, "pieces channels d_state"], Float[Array, "pieces channels d_state"]]:
    """Returns the states before and after each piece."""
    nothing = jnp.zeros((len(pieces.row), *begun.shape[1:]), jnp.float32)
    added, _ = jax.lax.scan(
        lambda state, token: (advance(state, token, rates), None), nothing, parts
    )
    kept = jnp.exp(jnp.sum(parts.step, axis=0)[:, :, None] * rates[None])

    def visit(
        state: Float[Array, "channels d_state"], piece: tuple[Array, Array, Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        added, kept, row, first = piece
        before = jnp.where(first, begun[row], state)
        after = kept * before + added
        return after, (before, after)

    steps = (added, kept, pieces.row, pieces.first)
    _, (before, after) = jax.lax.scan(visit, jnp.zeros_like(begun[0]), steps)
    return before, after

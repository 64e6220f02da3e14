"""`delta_scan` in plain XLA: a triangular system within each piece of a chunk, and a loop that carries the state.

The system is that of Yang et al. (Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484): a token's
correction depends on the state and on the corrections of all earlier tokens of its piece. Under the fixed order of sums
the recurrence runs token by token, so that decode steps are steps of it too.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments.delta import DeltaArrays, DeltaSizes, Tokens, tokens_of
from pallas_kernels.arguments.states import StateTables
from pallas_kernels.fixed_order import is_fixed, sum_of_last
from pallas_kernels.packed.rows import Pieces, cut, rows_of_tokens
from pallas_kernels.packed.states import by_token, put_pieces
from pallas_kernels.packed.token_scan import scan_tokens

LARGEST_PIECE = 64
# A token's log decay is at least this: its exponential is 0 in float32, and sums over a piece keep their precision.
_LEAST_DECAY = -104.0
_multiply = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def delta_scan(
    layer: DeltaArrays,
    tables: StateTables,
    *,
    chunk_size: int,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Implements `api.delta_scan`."""
    if is_fixed():
        return _by_token(layer, tables, chunk_size=chunk_size)
    a_log, dt_bias, states, qkv, a, b = layer
    cu_q_lens, seq_lens, read_states, *_ = tables
    tokens = len(qkv)
    size = max(n for n in range(1, min(chunk_size, LARGEST_PIECE) + 1) if chunk_size % n == 0)
    positions = seq_lens - (cu_q_lens[1:] - cu_q_lens[:-1])
    pieces = cut(cu_q_lens, positions, tokens=tokens, size=size)
    parts = tokens_of(a_log, dt_bias, qkv, a, b, DeltaSizes.of(states, qkv))
    begun = states.at[read_states].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    out, after = _carry(_gather(parts, pieces, size), pieces, begun.astype(jnp.float32))
    row, place = rows_of_tokens(cu_q_lens, tokens)
    out = by_token(out, pieces, row, place, positions)
    out = jnp.where((place >= 0)[:, None, None], out, 0.0).astype(qkv.dtype)
    return out, put_pieces(states, after, pieces, tables, chunk_size=chunk_size)


def _by_token(
    layer: DeltaArrays, tables: StateTables, *, chunk_size: int
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Computes the recurrence token by token."""

    def advance(state: Array, token: Tokens) -> tuple[Array, Array]:
        state *= jnp.exp(token.decay)[..., None]
        correction = (token.v - _read(state, token.k)) * token.beta[:, None]
        state += token.k[:, :, None] * correction[:, None, :]
        return state, _read(state, token.q)

    sizes = DeltaSizes.of(layer.states, layer.qkv)
    parts = tokens_of(layer.a_log, layer.dt_bias, *layer[3:], sizes)
    out, states = scan_tokens(
        advance, layer.states, parts, tables, chunk_size=chunk_size, rounds=True
    )
    return out.astype(layer.qkv.dtype), states


def _read(
    state: Float[Array, "heads key_dim value_dim"], key: Float[Array, "heads key_dim"]
) -> Float[Array, "heads value_dim"]:
    """Returns the products of each head's state with a key or query."""
    return sum_of_last(jnp.swapaxes(state, 1, 2) * key[:, None, :])[:, :, 0]


def _gather(parts: Tokens, pieces: Pieces, size: int) -> Tokens:
    """Returns each piece's tokens, [pieces, size, heads, ...], padded with zeros, which leave a state unchanged."""
    inside = jnp.arange(size, dtype=jnp.int32)
    real = inside[None, :] < pieces.length[:, None]
    token = jnp.where(real, pieces.start[:, None] + inside[None, :], 0)
    taken = (
        jnp.where(real.reshape(*real.shape, *(1,) * (part.ndim - 1)), part[token], 0.0)
        for part in parts
    )
    return Tokens(*taken)


def _carry(
    tokens: Tokens, pieces: Pieces, begun: Float[Array, "rows heads key_dim value_dim"]
) -> tuple[
    Float[Array, "pieces size heads value_dim"], Float[Array, "pieces heads key_dim value_dim"]
]:
    """Returns each token's output, and the state after each piece."""
    decay = jnp.maximum(tokens.decay, _LEAST_DECAY)
    passed = jnp.cumsum(decay, axis=1).transpose(0, 2, 1, 3)
    q, k, v = (part.transpose(0, 2, 1, 3) for part in (tokens.q, tokens.k, tokens.v))
    beta = tokens.beta.transpose(0, 2, 1)[..., None]
    system = _decayed_products(beta * k, k, passed)
    wanted = jnp.concatenate((beta * v, beta * k * jnp.exp(passed)), axis=-1)
    # `unit_diagonal` ignores the diagonal of `system` and uses ones, for a token's own correction.
    solved = jax.scipy.linalg.solve_triangular(system, wanted, lower=True, unit_diagonal=True)
    fresh, known = jnp.split(solved, (v.shape[-1],), axis=-1)
    last = passed[:, :, -1]
    steps = (
        fresh,
        known,
        _decayed_products(q, k, passed),
        q * jnp.exp(passed),
        k * jnp.exp(last[:, :, None] - passed),
        jnp.exp(last)[..., None],
        pieces.row,
        pieces.first,
    )

    def visit(state: Array, now: tuple) -> tuple[Array, tuple[Array, Array]]:
        fresh, known, reads, asked, left, kept, row, first = now
        state = jnp.where(first, begun[row], state)
        correction = fresh - _multiply("hik,hkv->hiv", known, state)
        out = _multiply("hik,hkv->hiv", asked, state) + _multiply("hij,hjv->hiv", reads, correction)
        after = kept * state + _multiply("hik,hiv->hkv", left, correction)
        return after, (out, after)

    _, (out, after) = jax.lax.scan(visit, jnp.zeros_like(begun[0]), steps)
    return out.transpose(0, 2, 1, 3), after


def _decayed_products(
    asked: Float[Array, "pieces heads size key_dim"],
    k: Float[Array, "pieces heads size key_dim"],
    passed: Float[Array, "pieces heads size channels"],
) -> Float[Array, "pieces heads size size"]:
    """Returns the product of each query with each key that is not later, of which each component has decayed since.

    Args:
        asked: queries.
        k: keys.
        passed: sums of the log decays of a piece's tokens up to each one.
    """
    size = passed.shape[2]
    earlier = jnp.tril(jnp.ones((size, size), bool))[:, :, None]
    # Mask before the exponential, which would overflow above the diagonal.
    since = jnp.where(earlier, passed[:, :, :, None] - passed[:, :, None], -jnp.inf)
    if passed.shape[-1] == 1:
        return _multiply("phik,phjk->phij", asked, k) * jnp.exp(since)[..., 0]
    # As one sum, which XLA computes without storing its terms. Factors for queries and for keys alone would overflow.
    return jnp.sum(asked[:, :, :, None] * k[:, :, None] * jnp.exp(since), axis=-1)

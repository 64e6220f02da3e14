"""`ssd_scan` in plain XLA: batched matrix products within pieces, and a loop that carries the state through them.

Under the fixed order of sums the recurrence runs token by token, so that decode steps are steps of it too.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments.ssd import Sizes, SsdArrays, finish, rates, steps
from pallas_kernels.arguments.states import StateTables
from pallas_kernels.fixed_order import is_fixed, sum_of_last
from pallas_kernels.packed.rows import Pieces, cut, rows_of_tokens, snapshots_at
from pallas_kernels.packed.states import put_states
from pallas_kernels.packed.token_scan import scan_tokens

# Most tokens of a piece of a chunk: longer pieces need larger matrices of weights, shorter ones more states.
LARGEST_PIECE = 64


def piece_size(chunk_size: int) -> int:
    """Returns the tokens of a piece: the largest divisor of `chunk_size` up to `LARGEST_PIECE`."""
    sizes = range(min(chunk_size, LARGEST_PIECE), 0, -1)
    return next(size for size in sizes if chunk_size % size == 0)


class _Chunks(NamedTuple):
    """The inputs of each piece in float32, padded with zeros.

    `passed` is the log decay of the piece's initial state up to and including each token.
    """

    x: Float[Array, "pieces size groups heads_per_group head_dim"]
    b: Float[Array, "pieces size groups d_state"]
    c: Float[Array, "pieces size groups d_state"]
    step: Float[Array, "pieces size groups heads_per_group"]
    passed: Float[Array, "pieces size groups heads_per_group"]


def ssd_scan(
    layer: SsdArrays,
    tables: StateTables,
    *,
    chunk_size: int,
    z: Float[Array, "tokens d_inner"] | None = None,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Implements `api.ssd_scan`."""
    if is_fixed():
        return _by_token(layer, tables, chunk_size=chunk_size, z=z, dt_limits=dt_limits)
    a_log, d, dt_bias, states, xbc, dt = layer
    cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, snapshot_states = tables
    sizes, tokens, size = Sizes.of(states, xbc), len(xbc), piece_size(chunk_size)
    positions = seq_lens - (cu_q_lens[1:] - cu_q_lens[:-1])
    pieces = cut(cu_q_lens, positions, tokens=tokens, size=size)
    chunks = _gather(a_log, dt_bias, xbc, dt, sizes, pieces, size, dt_limits)
    begun = states.at[read_states].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    before, after = _carry(chunks, pieces, begun.astype(jnp.float32))
    out = _within(chunks) + _from_before(chunks, before)
    row, place = rows_of_tokens(cu_q_lens, tokens)
    offset = (positions % size)[row] + place
    first = (
        jnp.zeros(len(read_states), jnp.int32)
        .at[pieces.row]
        .add(jnp.where(pieces.first, jnp.arange(len(pieces.row), dtype=jnp.int32), 0))
    )
    # A row's first piece starts with the row's first token, at any offset in a chunk.
    inside = jnp.where(offset < size, place, offset % size)
    out = out[first[row] + offset // size, inside].reshape(tokens, sizes.heads, sizes.head_dim)
    x, _, _ = sizes.split(xbc)
    out = jnp.where((place >= 0)[:, None, None], finish(out, x, d, z), 0.0)
    ends = jnp.where(pieces.last, write_states[pieces.row], len(states))
    states = put_states(states, ends, after)
    if snapshot_ends is not None and len(snapshot_ends):
        stop = pieces.start + pieces.length
        known = (pieces.length > 0) & (
            pieces.last
            | ((seq_lens[pieces.row] - (cu_q_lens[pieces.row + 1] - stop)) % chunk_size == 0)
        )
        kept = snapshots_at(stop, snapshot_ends, snapshot_states, len(states))
        states = put_states(states, jnp.where(known, kept, len(states)), after)
    return out.astype(xbc.dtype), states


def _by_token(
    layer: SsdArrays,
    tables: StateTables,
    *,
    chunk_size: int,
    z: Float[Array, "tokens d_inner"] | None,
    dt_limits: tuple[float, float],
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Computes the recurrence token by token."""
    sizes, decays = Sizes.of(layer.states, layer.xbc), rates(layer.a_log)
    x, b, c = sizes.split(layer.xbc.astype(jnp.float32))
    b, c = (jnp.repeat(part, sizes.heads // sizes.groups, axis=1) for part in (b, c))

    def advance(state: Array, token: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        x, b, c, step = token
        added = (step[:, None] * x)[:, :, None] * b[:, None, :]
        state = jnp.exp(step * decays)[:, None, None] * state + added
        return state, sum_of_last(state * c[:, None, :])[:, :, 0]

    parts = (x, b, c, steps(layer.dt, layer.dt_bias, dt_limits))
    out, states = scan_tokens(
        advance, layer.states, parts, tables, chunk_size=chunk_size, rounds=True
    )
    real = jnp.arange(len(x), dtype=jnp.int32) < tables.cu_q_lens[-1]
    out = jnp.where(real[:, None, None], finish(out, x, layer.d, z), 0.0)
    return out.astype(layer.xbc.dtype), states


def _gather(
    a_log: Array,
    dt_bias: Array,
    xbc: Array,
    dt: Array,
    sizes: Sizes,
    pieces: Pieces,
    size: int,
    dt_limits: tuple[float, float],
) -> _Chunks:
    inside = jnp.arange(size, dtype=jnp.int32)
    real = inside[None, :] < pieces.length[:, None]
    token = jnp.where(real, pieces.start[:, None] + inside[None, :], 0)
    shape = (*token.shape, sizes.groups, sizes.heads // sizes.groups)

    def take(part: Array) -> Array:
        taken = part.astype(jnp.float32)[token]
        return jnp.where(real.reshape(*real.shape, *(1,) * (part.ndim - 1)), taken, 0.0)

    x, b, c = sizes.split(xbc)
    step = take(steps(dt, dt_bias, dt_limits))
    passed = jnp.cumsum(step * rates(a_log)[None, None], axis=1)
    return _Chunks(
        take(x).reshape(*shape, sizes.head_dim),
        take(b),
        take(c),
        step.reshape(shape),
        passed.reshape(shape),
    )


_multiply = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _within(chunks: _Chunks) -> Float[Array, "pieces size groups heads_per_group head_dim"]:
    """Returns each token's output from the tokens of its own piece."""
    size = chunks.x.shape[1]
    earlier = jnp.tril(jnp.ones((size, size), bool))[None, :, :, None, None]
    # Mask before the exponential, which would overflow above the diagonal.
    passed = jnp.where(earlier, chunks.passed[:, :, None] - chunks.passed[:, None], -jnp.inf)
    weights = _multiply("pign,pjgn->pijg", chunks.c, chunks.b)[..., None] * jnp.exp(passed)
    return _multiply("pijgh,pjghd->pighd", weights * chunks.step[:, None], chunks.x)


def _from_before(
    chunks: _Chunks, before: Float[Array, "pieces heads head_dim d_state"]
) -> Float[Array, "pieces size groups heads_per_group head_dim"]:
    """Returns each token's output from the initial state of its piece."""
    state = before.reshape(len(before), *chunks.x.shape[2:], before.shape[-1])
    read = _multiply("pign,pghdn->pighd", chunks.c, state)
    return read * jnp.exp(chunks.passed)[..., None]


def _carry(
    chunks: _Chunks, pieces: Pieces, begun: Float[Array, "rows heads head_dim d_state"]
) -> tuple[
    Float[Array, "pieces heads head_dim d_state"], Float[Array, "pieces heads head_dim d_state"]
]:
    """Returns the states before and after each piece."""
    last = chunks.passed[:, -1]
    left = jnp.exp(last[:, None] - chunks.passed) * chunks.step
    added = _multiply("pjghd,pjgn->pghdn", chunks.x * left[..., None], chunks.b)
    kept = jnp.exp(last).reshape(len(last), -1, 1, 1)
    added = added.reshape(len(last), *begun.shape[1:])

    def visit(state: Array, now: tuple) -> tuple[Array, tuple[Array, Array]]:
        added, kept, row, first = now
        before = jnp.where(first, begun[row], state)
        after = kept * before + added
        return after, (before, after)

    now = (added, kept, pieces.row, pieces.first)
    return jax.lax.scan(visit, jnp.zeros_like(begun[0]), now)[1]

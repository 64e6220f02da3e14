"""Consumer warpgroups of the `latent_attention` kernel: wgmma products and online softmax for 64 query rows.

The schedule is FlashMLA's. In each pair of tiles the leader computes the scores of the first tile and the follower
those of the second. Each keeps its own tile's weights in registers and passes them to the other through shared memory,
with the running maximum, from which the other one continues. `p_tile` holds one tile of weights at a time: first the
leader's, then the follower's, which the follower writes after it has multiplied the leader's.

Names: `m` is the running maximum and `total` the running sum of the softmax (base 2), `p` the weights of a tile. Each
has one row per query. `total` has 8 columns of partial sums of the consumer's own tiles, so that lanes are reduced only
once, at the end. `scores` and `acc` are the accumulators of the two products.
"""

from collections.abc import Mapping
from functools import partial, reduce
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.latent_kernel.join import Join
from pallas_kernels.latent_kernel.kernel import Kernel
from pallas_kernels.latent_kernel.pieces import Piece
from pallas_kernels.latent_kernel.schedule import COLUMN_TILE, SLOTS, TILE
from pallas_kernels.mosaic.accumulators import add_product, wait_for_products
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.softmax import LOG2_E, rescale
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, column_groups, over_columns

State = tuple[Array, Array]
# How far scores (base 2) may exceed the running maximum before it is raised. Weights then reach 256, which floating
# point represents with the same relative precision.
_SLACK = 8.0


class Consumer:
    """One of the two consumer warpgroups; `half` names the half of the values' columns that it multiplies."""

    number: int
    half: str

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], piece: Piece) -> None:
        self.kernel, self.geometry, self.refs, self.piece = kernel, kernel.geometry, refs, piece
        self.multiply = partial(add_product, interpret=kernel.interpret)
        self.result = partial(wait_for_products, interpret=kernel.interpret)
        self.producer = None if kernel.has_producer else kernel.source.producer(kernel, refs, piece)

    def process_pair(self, pair: Array, state: State, *, masked: bool) -> State:
        """Adds a pair of tiles to the softmax and to `acc`."""
        raise NotImplementedError

    def run(self) -> None:
        """Processes the share's keys, then combines and writes the result."""
        if self.producer is not None and self.number == 0:
            self.producer.fetch_queries()
        for slot in range(SLOTS):
            self.release(slot)
        plgpu.barrier_wait(self.refs["q_arrived"])
        if self.kernel.interpret:
            self.scores, self.acc = (self.refs[name].at[self.number] for name in ("scores", "acc"))
            self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)
            m, total, out = self.attend()
        else:
            widths = (TILE, self.geometry.half)
            accumulators = [plgpu.ACC((WGMMA_ROWS, width), jnp.float32) for width in widths]
            m, total, out = pl.run_scoped(self.attend_in, *accumulators)
        if self.producer is not None and self.kernel.interpret:
            self.producer.drain(self.half)
        Join(self.kernel, self.refs, self.piece, self.number).deliver(m, total, out)

    def attend_in(self, scores: Ref, acc: Ref) -> tuple[Array, Array, Array]:
        """Runs `attend` with these accumulators."""
        self.scores, self.acc = scores, acc
        return self.attend()

    def attend(self) -> tuple[Array, Array, Array]:
        """Returns the maximum, the sum of the consumer's own weights, and its half of the unnormalised output."""
        m = plgpu.layout_cast(jnp.full((WGMMA_ROWS,), -jnp.inf, jnp.float32), PER_ROW)
        self.hold_queries()
        total = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, ROW_TILE), jnp.float32), WGMMA)
        state, piece = (m, total), self.piece
        for start, stop, masked in (
            (piece.start, piece.clear, False),
            (piece.clear, piece.stop, True),
        ):
            state = lax.fori_loop(start, stop, partial(self.process_pair, masked=masked), state)
        m, total = state
        return m, jnp.sum(total, axis=1), self.result(self.acc, 0)

    def hold_queries(self) -> None:
        """Loads the last columns of queries into registers."""
        width = self.geometry.width
        self.first_held = width - self.kernel.source.held * COLUMN_TILE
        self.held = {
            start: plgpu.load(self.refs["q_tile"].at[0, :, pl.ds(start, COLUMN_TILE)], layout=WGMMA)
            for start in range(self.first_held, width, COLUMN_TILE)
        }

    def opaque(self, slot: int) -> Array:
        """Returns a constant index hidden from the compiler, which else keeps all operands' addresses in registers."""
        return lax.optimization_barrier(jnp.int32(slot))

    def start_scores(self, slot: int, pair: Array) -> None:
        """Issues the product of the queries with the consumer's own tile of a pair."""
        g, refs = self.geometry, self.refs
        self.scores[...] = plgpu.layout_cast(jnp.zeros(self.scores.shape, jnp.float32), WGMMA)
        column = 0
        for part in ("lo", "hi", "rope"):
            if part != "rope":
                self.wait(part, slot, pair)
            width = g.half if part != "rope" else g.width - g.value_dim
            held = min(width, max(0, column + width - self.first_held))
            if width > held:
                queries = refs["q_tile"].at[self.opaque(0), :, pl.ds(column, width - held)]
                keys = refs[part].at[self.opaque(slot), :, pl.ds(0, width - held)]
                self.multiply(self.scores, queries, keys, transposed=True)
            for start in range(width - held, width, COLUMN_TILE):
                keys = refs[part].at[self.opaque(slot), :, pl.ds(start, COLUMN_TILE)]
                self.multiply(self.scores, self.held[column + start], keys, transposed=True)
            column += width

    def wait(self, half: str, slot: int, pair: Array) -> None:
        """Waits until a half of a tile has arrived."""
        plgpu.barrier_wait(self.refs[f"{half}_arrived"].at[slot])
        if self.kernel.source.exchange is not None:
            self.kernel.source.exchange.wait(self.refs, half, slot, pair - self.piece.start)

    def softmax(
        self, scores: Array, m: Array, tile: Array, *, masked: bool
    ) -> tuple[Array, Array, Array]:
        """Returns the new maximum, the tile's weights, and the factor of the previous sums and outputs.

        The maximum is raised only where scores exceed it by more than `_SLACK`, so most factors are 1 and the rescale
        of the outputs is skipped.
        """
        scale = self.kernel.scale * LOG2_E
        if masked:
            scores = self.mask(scores, tile)
        top = jnp.max(scores, axis=1) * scale
        m_next = jnp.where(top > m + _SLACK, top, m)
        finite = self.finite(m_next)
        p = jnp.exp2(scores * scale - over_columns(finite, TILE))
        return m_next, p, jnp.exp2(m - finite)

    def finite(self, m: Array) -> Array:
        """Replaces a maximum of -inf (a query without keys so far) by 0, since -inf - -inf would be NaN."""
        return jnp.where(m == -jnp.inf, 0.0, m)

    def mask(self, scores: Array, tile: Array) -> Array:
        """Sets scores of hidden keys to -inf.

        It works on 8 columns at a time: a comparison of whole tiles would keep all column indices in registers.
        """
        shape = (WGMMA_ROWS, ROW_TILE)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        seen = self.piece.first_keys - tile * TILE - column
        if self.geometry.packed:
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
            seen += self.token_of(row)
        pieces = [
            jnp.where(seen > index * ROW_TILE, part, -jnp.inf)
            for index, part in enumerate(column_groups(scores))
        ]
        return lax.concatenate(pieces, 1)

    def token_of(self, row: Array) -> Array:
        """Returns the index in the piece of a row's token."""
        heads = self.geometry.block_heads
        if heads & (heads - 1):
            return lax.div(row, jnp.full_like(row, heads))
        return lax.shift_right_logical(row, jnp.full_like(row, heads.bit_length() - 1))

    def publish(self, p: Array, m: Array) -> None:
        """Stores the weights and the maximum in shared memory and signals the other consumer."""
        assign(self.refs["p_tile"], 0, p)
        assign(self.refs["stats"], self.number, m)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs["p_ready"].at[self.number])

    def others_maximum(self) -> Array:
        """Waits for the other consumer's weights and returns its maximum."""
        other = 1 - self.number
        plgpu.barrier_wait(self.refs["p_ready"].at[other])
        return plgpu.load(self.refs["stats"].at[other], layout=PER_ROW, optimized=False)

    def others_weights(self) -> Ref:
        """Returns the ref to the other consumer's weights."""
        return self.refs["p_tile"].at[self.opaque(0)]

    def multiply_values(self, acc: Array, decay: Array, p: Any, slot: int) -> None:  # noqa: ANN401 - a ref or an array
        """Rescales the accumulator by `decay` and issues the product of weights and values that adds to it."""
        self.acc[...] = rescale(acc, decay, interpret=self.kernel.interpret)
        self.multiply(self.acc, p, self.refs[self.half].at[self.opaque(slot)])

    def release(self, slot: int, pair: Array | None = None) -> None:
        """Releases this consumer's half of a tile of a pair; without a producer, fetches that of the next pair."""
        plgpu.barrier_arrive(self.refs[f"{self.half}_free"].at[slot])
        if self.producer is None:
            return
        following = self.piece.start if pair is None else pair + 1
        start = partial(self.producer.start, self.half, SLOTS * following + slot, slot)
        pl.when(following < self.piece.stop)(start)

    def finish_fetch(self, pair: Array, *, masked: bool) -> None:
        """Without a producer, does what remains for this consumer's halves of a pair to arrive."""
        if self.producer is not None:
            for slot in range(SLOTS):
                self.producer.finish(self.half, SLOTS * pair + slot, slot, masked=masked)


class Leader(Consumer):
    """Computes the scores of the first tile of each pair and multiplies the first half of the values' columns."""

    number, half = 0, "lo"

    def process_pair(self, pair: Array, state: State, *, masked: bool) -> State:
        """Adds a pair of tiles to the softmax and to `acc`."""
        m, total = state
        self.finish_fetch(pair, masked=masked)
        self.start_scores(0, pair)
        raw = self.result(self.scores, 0)
        m, p, decay = self.softmax(raw, m, SLOTS * pair, masked=masked)
        total = total * over_columns(decay, ROW_TILE) + reduce(jnp.add, column_groups(p))
        p = p.astype(self.geometry.dtype)
        self.publish(p, m)
        self.multiply_values(self.result(self.acc, 0), decay, p, 0)
        acc = self.result(self.acc, 0)
        self.release(0, pair)
        m_next = self.others_maximum()
        decay = jnp.exp2(m - self.finite(m_next))
        self.multiply_values(acc, decay, self.others_weights(), 1)
        self.acc[...] = self.result(self.acc, 0)
        self.release(1, pair)
        return m_next, total * over_columns(decay, ROW_TILE)


class Follower(Consumer):
    """Computes the scores of the second tile of each pair and multiplies the second half of the values' columns."""

    number, half = 1, "hi"

    def process_pair(self, pair: Array, state: State, *, masked: bool) -> State:
        """Adds a pair of tiles to the softmax and to `acc`."""
        m, total = state
        self.finish_fetch(pair, masked=masked)
        self.start_scores(1, pair)
        m_first = self.others_maximum()
        first_decay = jnp.exp2(m - self.finite(m_first))
        self.multiply_values(self.result(self.acc, 1), first_decay, self.others_weights(), 0)
        raw = self.result(self.scores, 1)
        m, p, decay = self.softmax(raw, m_first, SLOTS * pair + 1, masked=masked)
        total *= over_columns(first_decay * decay, ROW_TILE)
        total += reduce(jnp.add, column_groups(p))
        acc = self.result(self.acc, 0)
        self.release(0, pair)
        p = p.astype(self.geometry.dtype)
        self.publish(p, m)
        self.multiply_values(acc, decay, p, 1)
        self.acc[...] = self.result(self.acc, 0)
        self.release(1, pair)
        return m, total

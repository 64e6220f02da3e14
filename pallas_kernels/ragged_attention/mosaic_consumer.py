"""Consumer warpgroup of the `ragged_attention` kernel: wgmma products and online softmax for 64 query rows.

In each iteration it issues the product of the queries with the next tile of keys together with that of the current
weights and values. The two consumers alternate in issuing such pairs (FlashAttention-3's ping-pong schedule), so that
one's softmax overlaps with the other's products.

Names: `m` is the running maximum and `total` the running sum of the softmax (base 2), `p` the weights of the latest
tile of keys. Each has one row per query. `total` has 8 columns of partial sums, so that lanes are reduced only once, at
the end. `scores` and `acc` are the accumulators of the two products. Tiles of keys are numbered from the row's first
key; `attend` and `skip_tiles` get `keys_before` such that `slot(keys_before + tile)` is the pipeline stage of a tile.
"""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.mosaic.accumulators import add_product, wait_for_products
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.mosaic.tiles import (
    PER_COLUMN,
    PER_ROW,
    WGMMA,
    column_groups,
    over_columns,
    over_rows,
)
from pallas_kernels.ragged_attention.mosaic_kernel import Kernel
from pallas_kernels.ragged_attention.mosaic_piece import Piece, Share, Worker
from pallas_kernels.ragged_attention.mosaic_producer import Producer
from pallas_kernels.ragged_attention.mosaic_schedule import CONSUMERS

# Largest head_dim whose queries are kept in registers, which costs less power than reading them from shared memory.
QUERIES_IN_REGISTERS = 128


class Consumer(Worker):
    """One of the two consumer warpgroups."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], number: Array) -> None:
        super().__init__(kernel, refs)
        self.number = number
        self.producer = None if kernel.has_producer else Producer(kernel, refs)
        self.multiply = partial(add_product, interpret=kernel.interpret)
        self.result = partial(wait_for_products, interpret=kernel.interpret)

    def run(self) -> None:
        """Processes all pieces of this block."""
        turn = self.refs["turn"].at[0]
        for free in self.free_barriers():
            plgpu.barrier_arrive(free)
        pl.when(self.number == 1)(lambda: plgpu.barrier_arrive(turn))
        self.visit_pieces(self.visit_piece)
        pl.when(self.number == 0)(lambda: plgpu.barrier_wait(turn))
        if self.kernel.interpret:
            self.fetching(Producer.drain)

    def visit_piece(self, piece: Piece, keys_before: Array, queries_before: Array) -> None:
        """Computes this consumer's share of one piece; tokens that see no key get zeros.

        Args:
            piece: the piece.
            keys_before: tiles of keys that the block's pipeline has processed before it.
            queries_before: tiles of queries, likewise.
        """
        share = Share(piece, self.number, self)
        query_slot = self.query_slot(queries_before)
        skip = partial(self.skip_tiles, piece, keys_before=keys_before - piece.first)

        @pl.when(piece.exists)
        def _() -> None:
            self.fetching(Producer.start, piece)
            plgpu.barrier_wait(self.refs["q_arrived"].at[query_slot])
            skip(piece.first, share.first_tile)
            attend = partial(self.attend, piece, share, keys_before - piece.first, query_slot)
            out, lse = lax.cond(share.sees, attend, self.output_without_keys)
            skip(share.stop_tile, piece.stop)
            reloaded = self.reload(piece)
            self.write(reloaded, Share(reloaded, self.number, self), query_slot, out, lse)
            plgpu.barrier_arrive(self.refs["q_free"].at[query_slot])

    def reload(self, piece: Piece) -> Piece:
        """Loads a piece's description again, so that its fields occupy no registers during the loop over keys."""
        return Piece(self.kernel, self.refs, lax.optimization_barrier(piece.number))

    def fetching(self, job: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 - the job's
        """Runs a job of the producer in the second consumer, which sees the later keys, if there is no producer."""
        if self.producer is not None:
            pl.when(self.number == CONSUMERS - 1)(partial(job, self.producer, *arguments))

    def release(self, pool: str, piece: Piece, tile: Array, slot: Array, *, late: int = 0) -> None:
        """Releases the stage of the tile `late` before `tile`; without a producer, starts to fetch into it."""
        plgpu.barrier_arrive(self.refs[f"{pool}_free"].at[slot])
        ahead = self.schedule.stages - late
        self.fetching(Producer.start_tile, pool, piece, tile, slot, ahead)

    def skip_tiles(self, piece: Piece, start: Array, stop: Array, *, keys_before: Array) -> None:
        """Waits for and releases tiles of keys that only the other consumer needs."""
        refs = self.refs

        @pl.loop(start, stop)
        def _(tile: Array) -> None:
            slot = self.slot(keys_before + tile)
            plgpu.barrier_wait(refs["k_arrived"].at[slot])
            self.issue_in_turn(lambda: None)
            self.release("k", piece, tile, slot)
            self.fetching(Producer.clear_hidden, piece, tile, slot)
            plgpu.barrier_wait(refs["v_arrived"].at[slot])
            self.release("v", piece, tile, slot)

    def issue_in_turn(self, start_products: Callable[[], None]) -> None:
        """Issues products after the other consumer has issued its own, and passes the turn back."""
        plgpu.barrier_wait(self.refs["turn"].at[self.number])
        start_products()
        plgpu.barrier_arrive(self.refs["turn"].at[CONSUMERS - 1 - self.number])

    def attend(
        self, piece: Piece, share: Share, keys_before: Array, query_slot: Array
    ) -> tuple[Array, Array]:
        """Returns output and log-sum-exp of the share's queries over all keys that they see."""

        def run(scores: Ref, acc: Ref) -> tuple[Array, Array]:
            queries = self.refs["q_tiles"].at[query_slot, self.number]
            if self.geometry.head_dim <= QUERIES_IN_REGISTERS and not self.geometry.scaled:
                queries = plgpu.load(queries, layout=WGMMA)
            tile = partial(
                self.visit_tile,
                piece=piece,
                share=share,
                keys_before=keys_before,
                queries=queries,
                scores=scores,
                acc=acc,
            )
            if self.kernel.interpret:
                acc[...] = jnp.zeros(acc.shape, jnp.float32)
            state = tile(share.first_tile, None, masked=True)
            for start, stop, masked in share.loops():
                state = lax.fori_loop(start, stop, partial(tile, masked=masked), state)
            m, total, p = state
            slot = self.slot(keys_before + share.stop_tile - 1)
            plgpu.barrier_wait(self.refs["v_arrived"].at[slot])
            self.multiply(acc, p, self.refs["v_tiles"].at[slot])
            out = self.result(acc, 0)
            plgpu.barrier_arrive(self.refs["v_free"].at[slot])
            return self.normalise(piece, m, total, out)

        if self.kernel.interpret:
            return run(self.refs["scores"].at[self.number], self.refs["acc"].at[self.number])
        accumulators = [
            plgpu.ACC((WGMMA_ROWS, width), jnp.float32)
            for width in (self.schedule.keys, self.geometry.head_dim)
        ]
        return pl.run_scoped(run, *accumulators)

    def visit_tile(
        self,
        tile: Array,
        state: tuple[Array, Array, Array] | None,
        *,
        masked: bool,
        piece: Piece,
        share: Share,
        keys_before: Array,
        queries: Any,  # noqa: ANN401 - a ref or an array
        scores: Ref,
        acc: Ref,
    ) -> tuple[Array, Array, Array]:
        """Adds one tile of keys to the softmax, and the values of the previous tile to `acc`."""
        refs = self.refs
        slot = self.slot(keys_before + tile)
        before = self.slot(keys_before + tile - 1)
        if masked:
            self.fetching(Producer.clear_hidden, piece, tile, slot)
        scores[...] = plgpu.layout_cast(jnp.zeros(scores.shape, jnp.float32), WGMMA)
        plgpu.barrier_wait(refs["k_arrived"].at[slot])

        def start_products() -> None:
            self.multiply(scores, queries, refs["k_tiles"].at[slot], transposed=True)
            if state is not None:
                plgpu.barrier_wait(refs["v_arrived"].at[before])
                self.multiply(acc, state[2], refs["v_tiles"].at[before])

        self.issue_in_turn(start_products)
        self.fetching(Producer.prefetch_pages, piece, tile)
        raw = self.result(scores, 0 if state is None else 1)
        self.release("k", piece, tile, slot)
        if self.geometry.scaled:
            raw *= self.scales("k", piece, tile)
        old = None if state is None else state[:2]
        m, total, p, decay = self.softmax(raw, old, tile, share, masked=masked)
        if self.geometry.scaled:
            p *= self.scales("v", piece, tile)
        if state is not None:
            done = self.result(acc, 0)
            self.release("v", piece, tile, before, late=1)
            acc[...] = done * over_columns(decay, self.geometry.head_dim)
        return m, total, p.astype(self.geometry.dtype)

    def scales(self, pool: str, piece: Piece, tile: Array) -> Array:
        """Returns the scales of a tile's "k" or "v", repeated for each query row."""
        scales = self.refs[f"{pool}_scales"].at[piece.tile.row, piece.kv_head, tile]
        loaded = plgpu.load(scales, layout=PER_COLUMN, optimized=False)
        return over_rows(loaded, WGMMA_ROWS)

    def softmax(
        self,
        scores: Array,
        old: tuple[Array, Array] | None,
        tile: Array,
        share: Share,
        *,
        masked: bool,
    ) -> tuple[Array, Array, Array, Array]:
        """Returns the new `m` and `total`, the tile's weights, and the factor of the accumulated output."""
        scale, cap = self.options.scale * LOG2_E, self.options.soft_cap
        if cap is not None:
            # tanh from exp2 and a reciprocal; the hardware's `tanh.approx` errs by up to 5e-4.
            scores = 1.0 - 2.0 * (1.0 / (jnp.exp2(scores * (2.0 * scale / cap)) + 1.0))
            scale = cap * LOG2_E
        if masked:
            scores = self.mask(scores, tile, share)
        m = jnp.max(scores, axis=1) * scale
        if old is not None:
            m = jnp.maximum(m, old[0])
        # The maximum of a query without keys so far is -inf, and -inf - -inf would be NaN.
        finite = jnp.where(m == -jnp.inf, 0.0, m)
        p = jnp.exp2(scores * scale - over_columns(finite, self.schedule.keys))
        total = reduce(jnp.add, column_groups(p))
        if old is None:
            return m, total, p, m
        decay = jnp.exp2(old[0] - finite)
        return m, old[1] * over_columns(decay, ROW_TILE) + total, p, decay

    def mask(self, scores: Array, tile: Array, share: Share) -> Array:
        """Sets scores of hidden keys to -inf.

        It works on 8 columns at a time: a comparison of whole tiles would keep all column indices in registers.
        """
        shape = (WGMMA_ROWS, ROW_TILE)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        distance = (row & (self.geometry.tokens_per_consumer - 1)) - column
        pieces = []
        for index, piece in enumerate(column_groups(scores)):
            back = tile * self.schedule.keys + index * ROW_TILE - share.position
            visible = distance >= back
            if self.options.window is not None:
                visible &= distance < back + self.options.window
            pieces.append(jnp.where(visible, piece, -jnp.inf))
        return lax.concatenate(pieces, 1)

    def normalise(self, piece: Piece, m: Array, total: Array, out: Array) -> tuple[Array, Array]:
        """Divides by the sum, to which a head's sink adds its exponential; returns output and log-sum-exp."""
        total = jnp.sum(total, axis=1)
        empty = total == 0
        if "sinks" in self.refs:
            sinks = self.refs["sinks"].at[self.reload(piece).unit]
            sink = plgpu.load(sinks, layout=PER_ROW, optimized=False) * LOG2_E
            top = jnp.maximum(m, sink)
            shrink = jnp.exp2(m - top)
            total = total * shrink + jnp.exp2(sink - top)
            inverse = jnp.where(empty, 0.0, shrink * (1.0 / total))
            m = top
        else:
            inverse = jnp.where(empty, 0.0, 1.0 / total)
        lse = jnp.where(empty, -jnp.inf, m + jnp.log2(total)) * (1 / LOG2_E)
        return out * over_columns(inverse, self.geometry.head_dim), lse

    def output_without_keys(self) -> tuple[Array, Array]:
        """Returns output (zeros) and log-sum-exp (-inf) of queries that see no key."""
        out = jnp.zeros((WGMMA_ROWS, self.geometry.head_dim), jnp.float32)
        lse = jnp.full((WGMMA_ROWS,), -jnp.inf, jnp.float32)
        return plgpu.layout_cast(out, WGMMA), plgpu.layout_cast(lse, PER_ROW)

    def write(self, piece: Piece, share: Share, query_slot: Array, out: Array, lse: Array) -> None:
        """Stores the share's output: one copy per head, or token by token if the tile also has other rows' tokens."""
        refs, tokens = self.refs, self.geometry.tokens_per_consumer
        if "lse" in refs:
            assign(refs["lse"], (piece.tile.place, piece.unit, self.number), lse)
        out = out.astype(self.geometry.dtype)
        whole = (share.start == 0) & (share.stop == tokens)

        @pl.when(whole)
        def _() -> None:
            staged = refs["q_tiles"].at[query_slot, self.number]
            assign(staged, ..., out)
            plgpu.commit_smem()
            for head in range(self.geometry.pack):
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(head * tokens, tokens)],
                    refs["out"].at[
                        pl.ds(pl.multiple_of(share.token, ROW_TILE), tokens), piece.head + head
                    ],
                )

        @pl.when(~whole)
        def _() -> None:
            staged = refs["out_rows"].at[query_slot, self.number]
            assign(staged, ..., out)
            plgpu.commit_smem()

            @pl.loop(share.start, share.stop)
            def _(token: Array) -> None:
                for head in range(self.geometry.pack):
                    plgpu.copy_smem_to_gmem(
                        staged.at[pl.ds(head * tokens + token, 1)],
                        refs["out"].at[pl.ds(share.token + token, 1), piece.head + head],
                    )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

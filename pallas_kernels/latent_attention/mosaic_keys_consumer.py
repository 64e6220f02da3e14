"""Consumer warpgroup of the kernel in mosaic_keys.py: wgmma products and online softmax for all heads of one query.

Names: `m` is the running maximum and `total` the running sum of the softmax (base 2), `p` the weights of a tile. Each
has one column per head. `total` has one row of partial sums per position in a tile, so that warps are reduced only
once,
at the end. `scores` is keys x heads and `acc` components x heads, in one accumulator per piece of a tile.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.latent_attention.mosaic_keys import KeysKernel
from pallas_kernels.latent_attention.mosaic_keys_join import KeysJoin
from pallas_kernels.latent_attention.mosaic_keys_producer import slot_of, tiles_of
from pallas_kernels.latent_kernel.pieces import Piece
from pallas_kernels.latent_kernel.schedule import TILE
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.mosaic.tiles import PER_COLUMN, WGMMA, over_rows

State = tuple[Array, Array]


class KeysConsumer:
    """The consumer warpgroup."""

    def __init__(self, kernel: KeysKernel, refs: Mapping[str, Ref], piece: Piece) -> None:
        self.kernel, self.geometry, self.refs, self.piece = kernel, kernel.geometry, refs, piece
        # Number of value components in each piece of a tile; the last piece ends with the rotary part.
        starts = [number * kernel.widths[0] for number in range(len(kernel.widths))]
        left = [self.geometry.value_dim - start for start in starts]
        self.values = [
            min(width, count) for width, count in zip(kernel.widths, left, strict=True) if count > 0
        ]

    def run(self) -> None:
        """Processes the share's keys, then combines and writes the result."""
        for slot in range(self.kernel.ring):
            plgpu.barrier_arrive(self.refs["free"].at[slot])
        plgpu.barrier_wait(self.refs["q_arrived"])
        heads = self.geometry.heads
        if self.kernel.interpret:
            acc = self.refs["acc"]
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
            starts = [sum(self.values[:number]) for number in range(len(self.values))]
            rows = zip(starts, self.values, strict=True)
            accs = [acc.at[pl.ds(start, height)] for start, height in rows]
            m, total, outs = self.attend(self.refs["scores"], *accs)
        else:
            heights = (TILE, *self.values)
            accumulators = [plgpu.ACC((height, heads), jnp.float32) for height in heights]
            m, total, outs = pl.run_scoped(self.attend, *accumulators)
        KeysJoin(self.kernel, self.refs, self.piece).deliver(m, total, outs)

    def attend(self, scores: Ref, *accs: Ref) -> tuple[Array, Array, tuple[Array, ...]]:
        """Returns the maximum, the partial sums of weights, and the pieces of the unnormalised output."""
        self.scores, self.accs = scores, accs
        heads = self.geometry.heads
        m = plgpu.layout_cast(jnp.full((heads,), -jnp.inf, jnp.float32), PER_COLUMN)
        total = plgpu.layout_cast(jnp.zeros((TILE, heads), jnp.float32), WGMMA)
        state = (m, total)
        start, clear, stop = tiles_of(self.piece)
        for first, last, masked in ((start, clear, False), (clear, stop, True)):
            state = lax.fori_loop(first, last, partial(self.take, masked=masked), state)
        m, total = state
        return m, total, tuple(self.result(acc) for acc in accs)

    def take(self, tile: Array, state: State, *, masked: bool) -> State:
        """Adds a tile to the softmax and to `acc`."""
        m, total = state
        numbers = range(len(self.kernel.widths))
        slots = [slot_of(self.kernel, self.piece, tile, number) for number in numbers]
        self.start_scores(slots)
        scores = self.result(self.scores)
        m, p, decay = self.softmax(scores, m, tile, masked=masked)
        total = total * over_rows(decay, TILE) + p
        assign(self.refs["p_tile"].at[0].transpose((1, 0)), ..., p.astype(self.geometry.dtype))
        plgpu.commit_smem()
        for acc, height in zip(self.accs, self.values, strict=True):
            acc[...] = self.result(acc) * over_rows(decay, height)
        weights = self.refs["p_tile"].at[self.opaque(0)].transpose((1, 0))
        for acc, height, slot in zip(self.accs, self.values, slots, strict=False):
            values = self.refs["tiles"].at[slot, :, pl.ds(0, height)]
            self.multiply(acc, values.transpose((1, 0)), weights)
        for acc in self.accs:
            acc[...] = self.result(acc)
        for slot in slots:
            plgpu.barrier_arrive(self.refs["free"].at[slot])
        return m, total

    def opaque(self, slot: int) -> Array:
        """Returns a constant index hidden from the compiler, which else keeps all operands' addresses in registers."""
        return lax.optimization_barrier(jnp.int32(slot))

    def start_scores(self, slots: list[Array]) -> None:
        """Issues the product of a tile's keys with the queries."""
        refs = self.refs
        self.scores[...] = plgpu.layout_cast(jnp.zeros(self.scores.shape, jnp.float32), WGMMA)
        column = 0
        for slot, width in zip(slots, self.kernel.widths, strict=True):
            plgpu.barrier_wait(refs["arrived"].at[slot])
            queries = refs["q_tile"].at[self.opaque(0), :, pl.ds(column, width)]
            self.multiply(self.scores, refs["tiles"].at[slot], queries.transpose((1, 0)))
            column += width

    def softmax(
        self, scores: Array, m: Array, tile: Array, *, masked: bool
    ) -> tuple[Array, Array, Array]:
        """Returns the new maximum, the tile's weights, and the factor of the previous sums and outputs."""
        scale = self.kernel.scale * LOG2_E
        if masked:
            position = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=WGMMA)
            scores = jnp.where(position + tile * TILE < self.piece.keys, scores, -jnp.inf)
        m_next = jnp.maximum(m, jnp.max(scores, axis=0) * scale)
        p = jnp.exp2(scores * scale - over_rows(m_next, TILE))
        return m_next, p, jnp.exp2(m - m_next)

    def multiply(self, acc: Ref, left: Ref, right: Ref) -> None:
        """Issues the wgmma that adds the product of `left` and `right` to an accumulator."""
        if not self.kernel.interpret:
            plgpu.wgmma(acc, left, right)
            return
        left, right = left[...].astype(jnp.float32), right[...].astype(jnp.float32)
        acc[...] += lax.dot(left, right)
        plgpu.commit_smem()

    def result(self, acc: Any) -> Array:  # noqa: ANN401 - a ref
        """Returns an accumulator's value after waiting for all issued products."""
        return acc[...] if self.kernel.interpret else plgpu.wgmma_accumulator_load(acc, wait_n=0)

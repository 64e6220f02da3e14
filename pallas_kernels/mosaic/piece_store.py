"""Stores of a square of outputs, which is transposed in registers, for the kernels of scans over pieces of tokens.

The square has a row for each component and a column for each token. A whole piece is stored with one copy, a partial
one token by token, because the following tokens are other rows'.
"""

from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import Array

from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref, Slice
from pallas_kernels.mosaic.tiles import WGMMA


class OutputSquare(NamedTuple):
    """A warpgroup's buffer of outputs in shared memory, and its columns of the outputs in global memory.

    Attributes:
        copied: view of the buffer that is swizzled and not tiled, for copies of whole pieces.
        tiled: view of the buffer that is swizzled and tiled, for stores from registers.
        rows: view of the buffer in plain row order, for copies of single tokens.
        target: the outputs, [tokens, columns].
        columns: the warpgroup's columns.
    """

    copied: Ref
    tiled: Ref
    rows: Ref
    target: Ref
    columns: Slice

    def store(self, out: Array, start: Array, length: Array, *, interpret: bool) -> None:
        """Stores the outputs of a piece of `length` tokens from token `start` on.

        Args:
            out: the outputs, transposed; columns past the piece's end are not stored.
            start: the piece's first token.
            length: number of the piece's tokens, at most the square's.
            interpret: whether the interpreter runs this.
        """
        # The copy of the previous piece's outputs reads from the same buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._put(out, interpret=interpret)
        plgpu.commit_smem()
        size = self.tiled.shape[0]

        @pl.when(length == size)
        def _() -> None:
            plgpu.copy_smem_to_gmem(self.copied, self.target.at[pl.ds(start, size), self.columns])

        @pl.when(length < size)
        def _() -> None:
            self._put_rows(interpret=interpret)

            @pl.loop(0, length)
            def _(token: Array) -> None:
                target = self.target.at[pl.ds(start + token, 1), self.columns]
                plgpu.copy_smem_to_gmem(self.rows.at[pl.ds(token, 1)], target)

    def _put(self, out: Array, *, interpret: bool) -> None:
        """Writes outputs, transposed back, to shared memory for the copy."""
        if interpret:
            assign(self.tiled, ..., out.T)
        else:
            assign(self.tiled.transpose((1, 0)), ..., out)

    def _put_rows(self, *, interpret: bool) -> None:
        """Rewrites outputs in shared memory in plain row order, for copies of single tokens."""
        if interpret:
            return
        held = plgpu.load(self.tiled, layout=WGMMA)
        # All warps must have loaded their part before any warp overwrites the buffer.
        plgpu.commit_smem()
        assign(self.rows, ..., held)
        plgpu.commit_smem()

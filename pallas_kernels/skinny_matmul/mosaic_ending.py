"""Epilogue of the `skinny_matmul` kernel: from a tile's sums in shared memory to the stored result.

Sums are in shared memory as columns x rows. Each warp processes up to 32 columns of a row, so that its loads and stores
are contiguous and sums along a row stay within the warp. All additions have a fixed order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.mosaic.activations import activated
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref, Slice
from pallas_kernels.mosaic.rows import Piece, broadcast, load, row_pieces, store_per_row
from pallas_kernels.skinny_matmul.mosaic_geometry import Geometry
from pallas_kernels.skinny_matmul.mosaic_schedule import Schedule

_WARP = 32


@dataclass(frozen=True)
class Ending:
    """The operations on a tile's sums before they are stored; the defaults, none, serve splits that XLA adds up.

    Attributes:
        result: dtype of the result.
        activation: name of the activation of gates, or without gates of all sums; `None` for none.
        gate_multiplier: factor of the gates before their activation.
        norm_eps: epsilon of the norm before the product, whose sums of squares are an input; `None` without that norm.
        has_bias: whether a bias is added.
        has_residual: whether a residual is added, last.
        weighs: whether the result times the next norm's weights, and the sums of its squares, are outputs as well.
        norm_row: row of the array of norms' weights.
        scales_rows: whether each row of x has a scale of its own; with many rows alone, see `has_factors`.
    """

    result: DTypeLike
    activation: str | None = None
    gate_multiplier: float = 1.0
    norm_eps: float | None = None
    has_bias: bool = False
    has_residual: bool = False
    weighs: bool = False
    norm_row: int = 0
    scales_rows: bool = False

    @property
    def has_factors(self) -> bool:
        """Whether each row's sums are multiplied: by its reciprocal root mean square, by its scale, or by both."""
        return self.norm_eps is not None or self.scales_rows

    @property
    def inputs(self) -> list[str]:
        """Names of its input arrays, in order."""
        names = {
            "squares": self.has_factors,
            "bias": self.has_bias,
            "residual": self.has_residual,
            "next_norm": self.weighs,
        }
        return [name for name, is_there in names.items() if is_there]

    @property
    def outputs(self) -> list[str]:
        """Names of its outputs, in order."""
        return ["out", "weighed", "squares_out"] if self.weighs else ["out"]


class End:
    """A block's epilogue: `prepare` once, then `store` for each tile after all warps have written its sums.

    With "staged_residual" among the references, the tile's residual has been copied there.
    """

    def __init__(
        self,
        geometry: Geometry,
        schedule: Schedule,
        ending: Ending,
        refs: Mapping[str, Ref],
        first_row: Array | None,
    ) -> None:
        self.geometry, self.schedule, self.ending, self.refs = geometry, schedule, ending, refs
        self._first_row = first_row

    def of_call(self, rows: Slice) -> Slice:
        """Returns rows of the block's group as rows of the call."""
        if self._first_row is None:
            return rows
        return pl.ds(self._first_row + rows.start, rows.size)

    def prepare(self) -> None:
        """Computes each row's reciprocal root mean square into shared memory, while the first copies are in flight."""
        norm_eps = self.ending.norm_eps
        if norm_eps is None:
            return
        squares = self.refs["squares"]
        parts = squares.shape[0]
        width = min(parts & -parts, _WARP)
        for piece in row_pieces(self.geometry.rows, width, 1):
            rows = pl.ds(piece.start, piece.size)
            found = []
            for start in range(0, parts, width):
                share = squares.at[pl.ds(start, width), self.of_call(rows)].transpose((1, 0))
                found.append(jnp.sum(load(share, piece.layout), axis=1))
            total = sum(found[1:], found[0])
            store_per_row(
                self.refs["factors"], rows, lax.rsqrt(total / self.geometry.inner + norm_eps)
            )
        plgpu.commit_smem()

    def store(
        self, tile: Array, column: Array, split: Array, first: Array | int, count: int
    ) -> None:
        """Stores the results of some rows of a tile, or their sums if XLA adds up splits.

        Args:
            tile: index of the tile.
            column: its first column.
            split: index of the split.
            first: the first row of x whose sums are in shared memory.
            count: number of these rows.
        """
        g, s, refs = self.geometry, self.schedule, self.refs
        width = min(s.columns, _WARP)
        for piece in row_pieces(count, width, 1):
            rows = pl.ds(first + piece.start, piece.size)
            starts = range(0, s.columns, width)
            sums = [
                [self.joined(piece, rows, start, width, part) for part in range(g.parts)]
                for start in starts
            ]
            if s.splits > 1:
                for start, parts in zip(starts, sums, strict=True):
                    for part, found in enumerate(parts):
                        place = pl.ds(column + (part * g.out + start), width)
                        assign(refs["out"], (split, self.of_call(rows), place), found)
                continue
            # Issue all loads before the first store: the compiler does not move loads above stores.
            places = [pl.ds(column + start, width) for start in starts]
            tiles = zip(sums, places, starts, strict=True)
            results = [
                self.ended(found, piece, rows, place, start) for found, place, start in tiles
            ]
            self.put("out", results, rows, places)
            if self.ending.weighs:
                squares = self.weigh(results, piece, rows, places)
                store_per_row(refs["squares_out"].at[tile], self.of_call(rows), squares)

    def put(self, name: str, values: list[Array], rows: Slice, places: list[Slice]) -> None:
        """Stores some rows of several column ranges."""
        for value, columns in zip(values, places, strict=True):
            assign(self.refs[name], (self.of_call(rows), columns), value)

    def joined(self, piece: Piece, rows: Slice, start: int, width: int, part: int) -> Array:
        """Returns some rows' sums over all folds, in order, divided by the rows' root mean squares."""
        g, s = self.geometry, self.schedule
        found = []
        for fold in range(s.folds):
            rows_before = 0 if s.by_warp else fold * s.window(g)
            of_fold = pl.ds(rows_before + piece.start, piece.size)
            columns = pl.ds((fold * g.parts + part) * s.columns + start, width)
            tile = self.refs["sums"].at[columns, of_fold].transpose((1, 0))
            found.append(load(tile, piece.layout))
        total = sum(found[1:], found[0])
        if self.ending.has_factors:
            factors = load(self.refs["factors"].at[rows], piece.layout.reduce(1))
            total *= broadcast(factors, total.shape, 0, piece.layout)
        return total

    def ended(
        self, sums: list[Array], piece: Piece, rows: Slice, columns: Slice, start: int
    ) -> Array:
        """Returns some rows' results: bias, activation, gate and residual in float32, then the cast.

        The columns begin `start` columns behind the tile's first.
        """
        ending, refs, layout = self.ending, self.refs, piece.layout

        def of_columns(name: str, part: int) -> Array:
            place = pl.ds(columns.start + part * self.geometry.out, columns.size)
            found = load(refs[name].at[place], layout.reduce(0)).astype(jnp.float32)
            return broadcast(found, sums[part].shape, 1, layout)

        if ending.has_bias:
            sums = [found + of_columns("bias", part) for part, found in enumerate(sums)]
        gates, *ups = sums
        if ending.gate_multiplier != 1.0:
            gates *= ending.gate_multiplier
        total = activated(gates, ending.activation)
        for up in ups:
            total *= up
        if ending.has_residual:
            residual = refs["residual"].at[self.of_call(rows), columns]
            if "staged_residual" in refs:
                residual = refs["staged_residual"].at[rows, pl.ds(start, columns.size)]
            total += load(residual, layout).astype(jnp.float32)
        return total.astype(ending.result)

    def weigh(self, results: list[Array], piece: Piece, rows: Slice, places: list[Slice]) -> Array:
        """Stores the results times the norm's weights, and returns each row's sum of squares over the tile."""
        norm, weighed, squares = self.refs["next_norm"].at[self.ending.norm_row], [], []
        for result, columns in zip(results, places, strict=True):
            wide = result.astype(jnp.float32)
            weights = load(norm.at[columns], piece.layout.reduce(0)).astype(jnp.float32)
            weighed.append(wide * broadcast(weights, wide.shape, 1, piece.layout))
            squares.append(jnp.sum(wide * wide, axis=1))
        self.put("weighed", [found.astype(self.ending.result) for found in weighed], rows, places)
        return sum(squares[1:], squares[0])

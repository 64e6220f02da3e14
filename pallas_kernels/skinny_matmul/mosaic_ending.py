"""What the `skinny_matmul` kernel for Hopper does with the sums of a tile: from shared memory to the result.

Sums lie in shared memory as columns by rows. Each warp takes up to 32 columns of a row, so that what it loads and
stores are neighbours, and what is added up along a row stays within the warp. Each sum has one place in one order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.mosaic.activations import activated
from pallas_kernels.mosaic.private_types import Ref, Slice
from pallas_kernels.mosaic.rows import Piece, broadcast, load, row_pieces, store_per_row
from pallas_kernels.skinny_matmul.mosaic_geometry import Geometry
from pallas_kernels.skinny_matmul.mosaic_schedule import Schedule

_WARP = 32


@dataclass(frozen=True)
class Ending:
    """What becomes of the sums of a tile before they are stored; nothing for parts that XLA adds up.

    Attributes:
        result: dtype of the result.
        activation: name of the function that gates, or all sums, go through; `None` for none.
        gate_multiplier: of gates, before their activation.
        norm_eps: rows of x are divided by their root mean square, for which the sums of their squares are given;
            `None` if they are not.
        is_scaled: rows and columns have factors, with which a weight of 8 bits comes.
        has_bias: a bias is added.
        has_residual: what the rows held before is added, last.
        weighs: besides the result come the result times weights, and the sums of its squares.
        norm_row: which row of the array of weights that is.
    """

    result: DTypeLike
    activation: str | None = None
    gate_multiplier: float = 1.0
    norm_eps: float | None = None
    is_scaled: bool = False
    has_bias: bool = False
    has_residual: bool = False
    weighs: bool = False
    norm_row: int = 0

    @property
    def inputs(self) -> list[str]:
        """Names of the arrays that it needs, in order."""
        names = {
            "row_factors": self.is_scaled,
            "scales": self.is_scaled,
            "squares": self.norm_eps is not None,
            "bias": self.has_bias,
            "residual": self.has_residual,
            "next_norm": self.weighs,
        }
        return [name for name, is_there in names.items() if is_there]

    @property
    def outputs(self) -> list[str]:
        """Names of what it stores, in order."""
        return ["out", "weighed", "squares_out"] if self.weighs else ["out"]


class End:
    """The end of a block's tiles: `prepare` once, then `store` each tile whose sums all warps have written."""

    def __init__(
        self, geometry: Geometry, schedule: Schedule, ending: Ending, refs: Mapping[str, Ref]
    ) -> None:
        self.geometry, self.schedule, self.ending, self.refs = geometry, schedule, ending, refs

    def prepare(self) -> None:
        """Puts what each row is to be multiplied by into shared memory, while the first copies are under way."""
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
                share = squares.at[pl.ds(start, width), rows].transpose((1, 0))
                found.append(jnp.sum(load(share, piece.layout), axis=1))
            total = sum(found[1:], found[0])
            store_per_row(
                self.refs["factors"], rows, lax.rsqrt(total / self.geometry.inner + norm_eps)
            )
        plgpu.commit_smem()

    def store(
        self, tile: Array, column: Array, split: Array, first: Array | int, count: int
    ) -> None:
        """Stores what becomes of some rows of a tile, or their sums if XLA adds up splits.

        Args:
            tile: its number.
            column: where it begins.
            split: whose sums they are.
            first: the first of the rows whose sums lie in shared memory.
            count: how many they are.
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
                        refs["out"][split, rows, place] = found
                continue
            # All that is read is read before anything is stored: a load does not overtake a store.
            places = [pl.ds(column + start, width) for start in starts]
            both = zip(sums, places, strict=True)
            results = [self.ended(found, piece, rows, columns) for found, columns in both]
            self.put("out", results, rows, places)
            if self.ending.weighs:
                squares = self.weigh(results, piece, rows, places)
                store_per_row(refs["squares_out"].at[tile], rows, squares)

    def put(self, name: str, values: list[Array], rows: Slice, places: list[Slice]) -> None:
        """Stores some rows of neighbouring columns."""
        for value, columns in zip(values, places, strict=True):
            self.refs[name][rows, columns] = value

    def joined(self, piece: Piece, rows: Slice, start: int, width: int, part: int) -> Array:
        """Returns some rows' sums, added up over the folds in their order."""
        g, s = self.geometry, self.schedule
        found = []
        for fold in range(s.folds):
            of_fold = pl.ds(fold * s.window(g) + piece.start, piece.size)
            columns = pl.ds((fold * g.parts + part) * s.columns + start, width)
            tile = self.refs["sums"].at[columns, of_fold].transpose((1, 0))
            found.append(load(tile, piece.layout))
        total = sum(found[1:], found[0])
        for name in ["factors"] * (self.ending.norm_eps is not None) + [
            "row_factors"
        ] * self.ending.is_scaled:
            factors = load(self.refs[name].at[rows], piece.layout.reduce(1))
            total *= broadcast(factors, total.shape, 0, piece.layout)
        return total

    def ended(self, sums: list[Array], piece: Piece, rows: Slice, columns: Slice) -> Array:
        """Returns what is stored of some rows' sums: bias, activation, gate and residual, all in float32."""
        ending, refs, layout = self.ending, self.refs, piece.layout

        def of_columns(name: str, part: int) -> Array:
            place = pl.ds(columns.start + part * self.geometry.out, columns.size)
            found = load(refs[name].at[place], layout.reduce(0)).astype(jnp.float32)
            return broadcast(found, sums[part].shape, 1, layout)

        if ending.is_scaled:
            sums = [found * of_columns("scales", part) for part, found in enumerate(sums)]
        if ending.has_bias:
            sums = [found + of_columns("bias", part) for part, found in enumerate(sums)]
        gates, *ups = sums
        if ending.gate_multiplier != 1.0:
            gates *= ending.gate_multiplier
        total = activated(gates, ending.activation)
        for up in ups:
            total *= up
        if ending.has_residual:
            total += load(refs["residual"].at[rows, columns], layout).astype(jnp.float32)
        return total.astype(ending.result)

    def weigh(self, results: list[Array], piece: Piece, rows: Slice, places: list[Slice]) -> Array:
        """Stores the results times their weights, and returns the sums of their squares over all columns."""
        norm, weighed, squares = self.refs["next_norm"].at[self.ending.norm_row], [], []
        for result, columns in zip(results, places, strict=True):
            wide = result.astype(jnp.float32)
            weights = load(norm.at[columns], piece.layout.reduce(0)).astype(jnp.float32)
            weighed.append(wide * broadcast(weights, wide.shape, 1, piece.layout))
            squares.append(jnp.sum(wide * wide, axis=1))
        self.put("weighed", [found.astype(self.ending.result) for found in weighed], rows, places)
        return sum(squares[1:], squares[0])

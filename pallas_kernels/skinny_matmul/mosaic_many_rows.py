"""The `skinny_matmul` kernel for many rows: large tiles, under the fixed order of sums with the bits of few rows.

A producer warpgroup copies chunks of the weight and of x into pipeline stages (slots). Each of one or two consumers
multiplies 64 rows of the weight, again the left operand, with up to 256 rows of x. A sum is one accumulator over chunks
in order, as it is with few rows (`Schedule.in_fixed_order`), and the epilogue is the same code (`End`). Blocks are
persistent: the producer proceeds to the next tile while the consumers store.

A weight in few bits is widened in registers, once for all rows of a tile: while one consumer widens, the other's
product runs. A scale for a whole row multiplies the sums. Scales of groups multiply the widened numbers, which are
rounded to x's dtype, since a second accumulator would not fit into the registers. Rows of x that are rounded to e4m3
are multiplied with codes of e4m3 as they lie, at twice the rate; each row's scale multiplies its sums.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.device import ROW_TILE, WGMMA_ROWS
from pallas_kernels.formats.few_bits import CODES
from pallas_kernels.mosaic.few_bits_turn import Factors, Packing, add_widened, turn_factors
from pallas_kernels.mosaic.jax_versions import assign, request_registers
from pallas_kernels.mosaic.launch import LANE_PARAMS, await_previous, mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, over_columns, swizzled
from pallas_kernels.skinny_matmul.mosaic_ending import End, Ending
from pallas_kernels.skinny_matmul.mosaic_geometry import Geometry
from pallas_kernels.skinny_matmul.mosaic_join import rows_of
from pallas_kernels.skinny_matmul.mosaic_schedule import PADDING, Schedule
from pallas_kernels.skinny_matmul.mosaic_tiling import WINDOW, Tiling

# Registers per thread (setmaxnreg) of two consumers and a producer, 504 in total; each warpgroup starts with 168.
_CONSUMED, _PRODUCED = 232, 40
# Axis of the blocks of a cluster.
_RANK = "rank"
# Rows of x per block of the launch that computes their reciprocal root mean squares.
_ROOTS = ROW_TILE


@dataclass(frozen=True)
class ManyRowsKernel:
    """The kernel for one geometry, tiling and epilogue.

    Attributes:
        geometry: sizes of the weight.
        rows: rows of the result, a multiple of 8. TMA fills the last tile's other rows of x with zeros.
        tiling: how the product is divided.
        ending: the epilogue.
        part: columns over which the squares of a row are added up.
        residual: dtype of the residual that is copied to shared memory; `None` if none is.
        early: whether the weight is copied while the previous kernel still runs (`argument_weights`).
    """

    geometry: Geometry
    rows: int
    tiling: Tiling
    ending: Ending
    part: int
    residual: DTypeLike | None = None
    early: bool = False

    def build(self, interpret: bool) -> Callable[..., list[Array]]:
        """Returns the function of the weight's arrays, x and the epilogue's inputs that launches the kernel.

        Instead of sums of squares it takes the rows' factors (`factors`). It returns the outputs of the epilogue.
        """
        clusters: dict[str, Any] = {}
        if self.tiling.cluster > 1:
            clusters = {"cluster": (self.tiling.cluster,), "cluster_names": (_RANK,)}
        return mosaic_kernel(
            partial(self._body, interpret),
            out_type=self._out_type(),
            scratch_types=self._scratch(),
            grid=(self.tiling.grid(self.geometry, self.rows),),
            grid_names=("cluster",),
            **clusters,
            num_threads=self.tiling.consumers + 1,
            thread_name="warpgroup",
            # The kernel places its barriers between warps itself.
            compiler_params=LANE_PARAMS,
            interpret=interpret,
            early=self.early,
            kernel_name="skinny_matmul_many_rows",
        )

    def _out_type(self) -> list[jax.ShapeDtypeStruct]:
        out = self.geometry.out
        out_type = [jax.ShapeDtypeStruct((self.rows, out), self.ending.result)]
        if self.ending.weighs:
            squares = jax.ShapeDtypeStruct((out // self.part, self.rows), jnp.float32)
            out_type = [*out_type, *out_type, squares]
        return out_type

    def _scratch(self) -> dict[str, Any]:
        g, t = self.geometry, self.tiling
        stored = g.dtype if g.packing is None else CODES[g.packing.code].stored

        def slots(rows: int, width: int, dtype: DTypeLike) -> Any:  # noqa: ANN401 - private to JAX
            return plgpu.SMEM((t.stages, rows, width), dtype, transforms=swizzled(width, dtype))

        copies = 1 + (t.consumers * g.parts if g.gated else 1)
        barrier = plgpu.Barrier
        if t.cluster > 1:
            # A copy of x fills a stage of all blocks, so all must have released it.
            barrier = partial(plgpu.ClusterBarrier, collective_axes=(_RANK,))
        extras: dict[str, Any] = {}
        if self.residual is not None:
            windows = (t.consumers, t.residual_windows)
            shape = (*windows, WINDOW, t.own_columns(g))
            extras["residuals"] = plgpu.SMEM(shape, self.residual)
            extras["residual_arrived"] = plgpu.Barrier(num_barriers=windows[0] * windows[1])
        return {
            **extras,
            "weights": slots(t.height, g.stored(g.turn), stored),
            "inputs": slots(t.rows, g.turn, g.multiplied),
            "sums": plgpu.SMEM((t.consumers, WGMMA_ROWS, WINDOW + PADDING), jnp.float32),
            "arrived": plgpu.Barrier(num_arrivals=copies, num_barriers=t.stages),
            "free": barrier(num_arrivals=t.consumers, num_barriers=t.stages),
        }

    def _body(self, interpret: bool, *arrays: Ref, **scratch: Ref) -> None:
        packing = self.geometry.packing
        parts = [] if packing is None else packing.names
        inputs = ["factors" if name == "squares" else name for name in self.ending.inputs]
        names = ["weight", *parts, "x", *inputs, *self.ending.outputs]
        block = _Block(self, dict(zip(names, arrays, strict=True)) | scratch, interpret)
        warpgroup, consumers = lax.axis_index("warpgroup"), self.tiling.consumers

        @pl.when(warpgroup < consumers)
        def _() -> None:
            if consumers > 1:
                request_registers(_CONSUMED, more=True)
            block.consume(warpgroup)

        @pl.when(warpgroup == consumers)
        def _() -> None:
            if consumers > 1:
                request_registers(_PRODUCED, more=False)
            block.produce()


class _Block:
    """One block. A *step* counts the turns of all its tiles."""

    def __init__(self, kernel: ManyRowsKernel, refs: Mapping[str, Ref], interpret: bool) -> None:
        self.kernel, self.refs, self.interpret = kernel, refs, interpret
        self.geometry, self.tiling = kernel.geometry, kernel.tiling
        self.turns = self.geometry.inner // self.geometry.turn
        self.number = lax.axis_index("cluster")
        self.rank = lax.axis_index(_RANK) if self.tiling.cluster > 1 else jnp.int32(0)
        self.grid = self.tiling.grid(self.geometry, kernel.rows)
        tiles = self.tiling.tiles(self.geometry, kernel.rows)
        # Number of this cluster's tiles: number, number + grid, ... below `tiles`.
        self.tiles = lax.div(tiles - self.number + (self.grid - 1), jnp.int32(self.grid))

    def find(self, index: Array) -> tuple[Array, Array]:
        """Returns the block's first column and the first row of x of the cluster's `index`-th tile.

        Tiles of the same columns are adjacent within a band of rows, so that they share the weight in L2.
        """
        t, g = self.tiling, self.geometry
        number = self.number + index * self.grid
        most, rows = t.band(self.kernel.rows), t.row_tiles(self.kernel.rows)
        columns = t.column_tiles(g)
        band = lax.div(number, jnp.int32(most * columns))
        within = number - band * (most * columns)
        height = jnp.minimum(rows - band * most, most)
        column = jnp.minimum(lax.div(within, height) * t.columns(g), g.out - t.columns(g))
        column += self.rank * t.block_columns(g)
        row = (band * most + lax.rem(within, height)) * t.rows
        return pl.multiple_of(column, ROW_TILE), pl.multiple_of(row, ROW_TILE)

    def slot(self, step: Array) -> Array:
        """Returns the pipeline stage of a step."""
        return lax.rem(step, jnp.int32(self.tiling.stages))

    def produce(self) -> None:
        """Runs the producer: copies each chunk into a stage that all consumers of the cluster have released."""
        stages = self.tiling.stages
        begun = 0
        if self.kernel.early:
            begun = min(stages, self.turns)
            column, row = self.find(jnp.int32(0))
            for turn in range(begun):
                self.fetch_weight(turn, column, jnp.int32(turn))
            await_previous(interpret=self.interpret)
            for turn in range(begun):
                self.fetch_rows(turn, row, jnp.int32(turn))

        def process_tile(index: Array, carry: None) -> None:
            column, row = self.find(index)

            def process_turn(turn: Array, carry: None) -> None:
                step = index * self.turns + turn
                slot = self.slot(step)
                pl.when(step >= stages)(partial(plgpu.barrier_wait, self.refs["free"].at[slot]))
                self.fetch_weight(slot, column, turn)
                self.fetch_rows(slot, row, turn)
                return carry

            first = jnp.where(index == 0, jnp.int32(begun), jnp.int32(0))
            lax.fori_loop(first, jnp.int32(self.turns), process_turn, None)
            return carry

        lax.fori_loop(jnp.int32(0), self.tiles, process_tile, None)
        # All arrivals at a barrier must be waited for before the block exits.
        steps = self.tiles * self.turns

        def drain(step: Array, carry: None) -> None:
            plgpu.barrier_wait(self.refs["free"].at[self.slot(step)])
            return carry

        lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

    def fetch_weight(self, slot: Array | int, column: Array, turn: Array) -> None:
        """Starts the copies of a turn's weight; each consumer's rows are adjacent, gates before the others."""
        g, t, refs = self.geometry, self.tiling, self.refs
        stored = g.stored(g.turn)
        octets = pl.ds(pl.multiple_of(turn * stored, stored), stored)
        # Without gates one copy has the rows of all consumers.
        size = t.own_columns(g) if g.gated else t.block_columns(g)
        for start in range(0, t.block_columns(g), size):
            for part in range(g.parts):
                rows = pl.multiple_of(column + (part * g.out + start), ROW_TILE)
                place = start * g.parts + part * size
                plgpu.copy_gmem_to_smem(
                    refs["weight"].at[pl.ds(rows, size), octets],
                    refs["weights"].at[slot, pl.ds(place, size)],
                    refs["arrived"].at[slot],
                )

    def fetch_rows(self, slot: Array | int, row: Array, turn: Array) -> None:
        """Starts the copy of a turn's rows of x."""
        g, t, refs = self.geometry, self.tiling, self.refs
        inner = pl.ds(pl.multiple_of(turn * g.turn, g.turn), g.turn)
        plgpu.copy_gmem_to_smem(
            refs["x"].at[pl.ds(row, t.rows), inner],
            refs["inputs"].at[slot],
            refs["arrived"].at[slot],
            collective_axes=_RANK if t.cluster > 1 else None,
        )

    def consume(self, warpgroup: Array) -> None:
        """Runs a consumer: multiplies its 64 rows of the weight with the tile's rows of x, and stores the result."""
        if self.kernel.early:
            await_previous(interpret=self.interpret)

        def process_tile(index: Array, carry: None) -> None:
            column, row = self.find(index)
            own = self.tiling.own_columns(self.geometry)
            column = pl.multiple_of(column + warpgroup * own, ROW_TILE)
            if self.kernel.residual is not None:
                for number in range(self.tiling.residual_windows):
                    self.in_window(row, number, partial(self.fetch_residual, warpgroup, column))
            packing = self.geometry.packing
            if packing is None:
                sums = self.multiply(warpgroup, index)
            else:
                rows = self.rows_of_weight(column)
                if self.geometry.rounds_rows:
                    sums = self.multiply(warpgroup, index)
                else:
                    sums = self.multiply_few_bits(warpgroup, index, rows, packing)
                if packing.groups == 1:
                    scales = self.factors_of(rows, jnp.int32(0), packing)[0][0]
                    sums *= over_columns(scales, self.tiling.rows)
            self.store(warpgroup, sums, column, row)
            return carry

        lax.fori_loop(jnp.int32(0), self.tiles, process_tile, None)

    def multiply(self, warpgroup: Array, index: Array) -> Array:
        """Returns the sums of a tile, 64 rows of the weight x all rows of x."""
        refs = self.refs
        own = pl.ds(pl.multiple_of(warpgroup * WGMMA_ROWS, WGMMA_ROWS), WGMMA_ROWS)

        def process_turn(sums: Ref, turn: Array, carry: None) -> None:
            step = index * self.turns + turn
            slot = self.slot(step)
            plgpu.barrier_wait(refs["arrived"].at[slot])
            left, right = refs["weights"].at[slot, own], refs["inputs"].at[slot]
            plgpu.wgmma(sums, left, right.transpose((1, 0)))
            # Wait for the previous turn's product, then release its stage.
            plgpu.wgmma_wait(1)

            @pl.when(turn > 0)
            def _() -> None:
                plgpu.barrier_arrive(refs["free"].at[self.slot(step - 1)])

            return carry

        def run(sums: Ref) -> Array:
            lax.fori_loop(jnp.int32(0), jnp.int32(self.turns), partial(process_turn, sums), None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs["free"].at[self.slot((index + 1) * self.turns - 1)])
            return sums[...]

        return pl.run_scoped(run, plgpu.ACC((WGMMA_ROWS, self.tiling.rows), jnp.float32))

    def rows_of_weight(self, column: Array) -> Array:
        """Returns the rows of the weight, in the layout `PER_ROW`, that a consumer multiplies for the columns."""
        own = self.tiling.own_columns(self.geometry)
        row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS,), 0, layout=PER_ROW)
        # Powers of two.
        part = lax.shift_right_logical(row, jnp.int32(own.bit_length() - 1))
        return column + (row & (own - 1)) + part * self.geometry.out

    def factors_of(self, rows: Array, turn: Array, packing: Packing) -> list[Factors]:
        """Loads the scales, and the zero points if there are any, of rows of the weight in a turn."""
        arrays, columns = {name: self.refs[name] for name in packing.names}, self.geometry.turn
        first = rows * 0 + turn * columns
        return turn_factors(arrays, rows, first, columns, packing, interpret=self.interpret)

    def multiply_few_bits(
        self, warpgroup: Array, index: Array, rows: Array, packing: Packing
    ) -> Array:
        """Returns the sums of a tile whose codes are widened; a scale for a whole row does not multiply them yet."""
        refs, by_row = self.refs, packing.groups == 1
        own = pl.ds(pl.multiple_of(warpgroup * WGMMA_ROWS, WGMMA_ROWS), WGMMA_ROWS)

        def process_turn(
            turn: Array, carry: tuple[Array, list[Factors]]
        ) -> tuple[Array, list[Factors]]:
            sums, factors = carry
            slot = self.slot(index * self.turns + turn)
            plgpu.barrier_wait(refs["arrived"].at[slot])
            codes, x = refs["weights"].at[slot, own], refs["inputs"].at[slot]
            sums = add_widened(
                sums, codes, x, factors, packing, scaled=not by_row, interpret=self.interpret
            )
            # Threads have read the codes by ordinary loads, which a copy into the stage must not overtake.
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs["free"].at[slot])
            # Behind the fence, which waits for all loads before it.
            return sums, factors if by_row else self.factors_of(rows, turn + 1, packing)

        zeros = plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, self.tiling.rows), jnp.float32), WGMMA)
        carry = zeros, self.factors_of(rows, jnp.int32(0), packing)
        return lax.fori_loop(jnp.int32(0), jnp.int32(self.turns), process_turn, carry)[0]

    def store(self, warpgroup: Array, sums: Array, column: Array, row: Array) -> None:
        """Runs the epilogue of few rows on one window of rows after the other."""
        staged, windows = self.refs["sums"].at[warpgroup], self.tiling.residual_windows

        def store_window(window: "_Window") -> None:
            assign(
                staged.at[:, pl.ds(0, WINDOW)], ..., rows_of(sums, window.number * WINDOW, WINDOW)
            )
            residual = None
            if self.kernel.residual is not None:
                place = window.number % windows
                plgpu.barrier_wait(self.refs["residual_arrived"].at[warpgroup * windows + place])
                residual = self.refs["residuals"].at[warpgroup, place]
            plgpu.commit_smem()
            self.end(staged, residual, column, window)
            plgpu.commit_smem()
            if (
                self.kernel.residual is not None
                and window.number + windows < self.tiling.rows // WINDOW
            ):
                later = window.number + windows
                self.in_window(row, later, partial(self.fetch_residual, warpgroup, column))

        for number in range(self.tiling.rows // WINDOW):
            self.in_window(row, number, store_window)

    def in_window(self, row: Array, number: int, run: Callable[["_Window"], None]) -> None:
        """Runs code on a window of the tile that begins at `row`, if the window has rows of the call."""
        first = row + number * WINDOW
        place = pl.multiple_of(first, ROW_TILE)
        rest = self.kernel.rows % WINDOW
        pl.when(first + WINDOW <= self.kernel.rows)(lambda: run(_Window(number, place, WINDOW)))
        # Tiles begin at multiples of their rows, so one window alone can be the last that has fewer rows.
        if rest and self.kernel.rows % self.tiling.rows // WINDOW == number:
            is_last = first + rest == self.kernel.rows
            pl.when(is_last)(lambda: run(_Window(number, place, rest)))

    def fetch_residual(self, warpgroup: Array, column: Array, window: "_Window") -> None:
        """Starts the copy of a window's residual; TMA fills rows past the end with zeros."""
        windows = self.tiling.residual_windows
        place = window.number % windows
        plgpu.copy_gmem_to_smem(
            self.refs["residual"].at[
                pl.ds(window.row, WINDOW), pl.ds(column, self.tiling.own_columns(self.geometry))
            ],
            self.refs["residuals"].at[warpgroup, place],
            self.refs["residual_arrived"].at[warpgroup * windows + place],
        )

    def end(self, staged: Ref, residual: Ref | None, column: Array, window: "_Window") -> None:
        """Stores the results of a window, whose sums are in shared memory, by the code of few rows."""
        g, k, own = self.geometry, self.kernel, self.tiling.own_columns(self.geometry)
        # The squares of each part are added up by themselves.
        width = min(own, k.part) if k.ending.weighs else own
        refs = dict(self.refs)
        if k.ending.has_factors:
            refs["factors"] = refs["factors"].at[pl.ds(window.row, window.count)]
        rows = replace(g, rows=window.count)
        for start in range(0, own, width):
            place = pl.multiple_of(column + start, ROW_TILE)
            refs["sums"] = staged.at[pl.ds(start, width * g.parts)]
            if residual is not None:
                refs["staged_residual"] = residual.at[:, pl.ds(start, width)]
            end = End(rows, _schedule(width), k.ending, refs, window.row)
            end.store(lax.div(place, jnp.int32(k.part)), place, jnp.int32(0), 0, window.count)


@dataclass(frozen=True)
class _Window:
    """Some adjacent rows of a tile whose results are stored at once.

    Attributes:
        number: index in the tile.
        row: first row of the call.
        count: number of rows, `WINDOW` but for the last rows of the call.
    """

    number: int
    row: Array
    count: int


def _schedule(columns: int) -> Schedule:
    """Returns a schedule of few rows whose tiles have these columns, for the epilogue."""
    return Schedule(columns, 1, 1, 1, 1, 1)


def row_factors(squares: Array, geometry: Geometry, ending: Ending, *, interpret: bool) -> Array:
    """Returns the reciprocal root mean square of each row by the code of few rows, in a launch of its own.

    A block of many rows would read all parts of its rows' squares again for each tile, in loads that are not adjacent.

    Args:
        squares: float32 sums of squares [parts, rows]; the rows are a multiple of 8.
        geometry: sizes of the product.
        ending: its epilogue, which has the norm's epsilon.
        interpret: whether the interpreter runs this.

    Returns:
        float32 [rows].
    """
    rows = squares.shape[1]
    return mosaic_kernel(
        partial(_compute_factors, replace(geometry, rows=_ROOTS), ending),
        out_type=jax.ShapeDtypeStruct((rows,), jnp.float32),
        grid=(rows // _ROOTS,),
        grid_names=("block",),
        compiler_params=LANE_PARAMS,
        interpret=interpret,
        kernel_name="row_factors",
    )(squares)


def _compute_factors(geometry: Geometry, ending: Ending, squares: Ref, factors: Ref) -> None:
    """Computes the factors of a block's rows, `geometry.rows` of them."""
    first = pl.multiple_of(lax.axis_index("block") * geometry.rows, ROW_TILE)
    refs = {"squares": squares, "factors": factors.at[pl.ds(first, geometry.rows)]}
    End(geometry, _schedule(ROW_TILE), ending, refs, first).prepare()

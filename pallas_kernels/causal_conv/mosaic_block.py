"""The Mosaic GPU kernel of `causal_conv` for Hopper: geometry, launch, and the work of one block.

A thread processes up to 8 adjacent channels and loops over the tokens with the last inputs in registers. Threads share
nothing, so shared memory would only add latency. Only the block of a row's first tokens accesses states; it reads the
row's initial state before it writes any. Refs to whole arrays have the names of the arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.mosaic.activations import silu
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.launch import mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import LOAD_BYTES, flat_pieces

_THREADS = 128


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        d_conv: number of taps.
        channels: channels of the convolution.
        first_channel: first column of x that is an input.
        activated: whether silu is applied to the output.
        dtype: dtype of x, states and outputs.
        tile: most tokens of one block.
        batch: number of tokens whose inputs are loaded at once.
        vector: most adjacent channels per thread, a power of two up to 8.
    """

    d_conv: int
    channels: int
    first_channel: int
    activated: bool
    dtype: DTypeLike
    tile: int = 32
    batch: int = 4
    vector: int = 4

    @classmethod
    def of(
        cls, weight: ArrayOrStruct, x: ArrayOrStruct, first_channel: int, activated: bool
    ) -> "Geometry":
        """Returns the geometry of these arrays."""
        d_conv, channels = weight.shape
        return cls(d_conv, channels, first_channel, activated, jnp.dtype(x.dtype))

    @property
    def tail(self) -> int:
        """Number of earlier inputs in a token's window."""
        return self.d_conv - 1

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First channel and width of each block: the full width of 128 threads, then powers of two for the rest."""
        whole = _THREADS * self.vector
        widths = [whole] * (self.channels // whole)
        rest = self.channels % whole
        widths += [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
        return tuple((sum(widths[:index]), width) for index, width in enumerate(widths))


class Tile(NamedTuple):
    """A run of tokens of one row; `first` is 1 for the row's first run."""

    row: Array
    start: Array
    length: Array
    first: Array


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry; `names` are the names of its input arrays in order."""

    geometry: Geometry
    names: tuple[str, ...]

    def build(self, tokens: int, num_tiles: int, interpret: bool) -> Callable[..., Array]:
        """Returns the function of arrays and of the pool's ref that launches the kernel."""
        g = self.geometry
        return mosaic_kernel(
            self._body,
            out_type=jax.ShapeDtypeStruct((tokens, g.channels), g.dtype),
            # All blocks are on one axis: grid axes other than the last are limited to 65535.
            grid=(num_tiles * len(g.spans),),
            grid_names=("block",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                unsafe_no_auto_barriers=True,
            ),
            interpret=interpret,
            kernel_name="causal_conv",
        )

    def _body(self, *refs: Ref) -> None:
        named = dict(zip([*self.names, "states", "out"], refs, strict=True))
        spans = self.geometry.spans
        block, count = lax.axis_index("block"), jnp.int32(len(spans))
        tile, place = lax.div(block, count), lax.rem(block, count)
        # Blocks of equal width share one branch; their first channel is computed.
        for width in sorted({width for _, width in spans}, reverse=True):
            same = [index for index, span in enumerate(spans) if span[1] == width]
            start = spans[same[0]][0] + (place - same[0]) * width
            run = partial(_Block(self, named, pl.multiple_of(start, 8), width).run, tile)
            if len(same) == len(spans):
                run()
            else:
                pl.when((place >= same[0]) & (place <= same[-1]))(run)


class _Block:
    """One block, which processes `width` channels from `start` on."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], start: Array, width: int) -> None:
        self.geometry, self.refs = kernel.geometry, refs
        self.start, self.width = start, width
        (self.piece,) = flat_pieces(width, LOAD_BYTES // self.geometry.vector)
        self.columns = pl.ds(start, width)

    def run(self, number: Array) -> None:
        """Processes one tile of tokens, or without tiles one row's only token."""
        if "tiles" not in self.refs:
            self.update(number)
            return
        tile = Tile(*(self.refs["tiles"][number, field] for field in range(len(Tile._fields))))
        rows = self.refs["read_states"].shape[0]
        pl.when((tile.length > 0) & (tile.row < rows))(partial(self.convolve, tile))
        pl.when((tile.length > 0) & (tile.row >= rows))(partial(self.clear, tile))

    def update(self, row: Array) -> None:
        """Processes a row's only token; a row that writes nothing is padding."""
        write = self.refs["write_states"][row]
        real = self.exists(write)
        window = [*self.state(row), self.input(row)]
        out = jnp.where(real, self.weighed(self.taps(), window), 0.0)
        assign(self.refs["out"], (row, self.columns), out.astype(self.geometry.dtype))
        pl.when(real)(partial(self.write_state, write, window[1:]))

    def clear(self, tile: Tile) -> None:
        """Writes zeros as the outputs of padding tokens."""
        zeros = plgpu.layout_cast(jnp.zeros((self.width,), self.geometry.dtype), self.piece.layout)

        @pl.loop(0, tile.length)
        def _(index: Array) -> None:
            assign(self.refs["out"], (tile.start + index, self.columns), zeros)

    def convolve(self, tile: Tile) -> None:
        """Processes a tile's tokens; the row's first tile also writes the row's states."""
        tail, batch = self.geometry.tail, self.geometry.batch
        taps = self.taps()
        window = lax.cond(
            tile.first == 1,
            lambda: tuple(self.state(tile.row)),
            lambda: tuple(self.input(tile.start - tail + index) for index in range(tail)),
        )
        pl.when(tile.first == 1)(partial(self.write_states, tile.row, window))

        def visit_batch(number: Array, window: tuple[Array, ...]) -> tuple[Array, ...]:
            token = tile.start + number * batch
            values = [*window, *(self.input(token + index) for index in range(batch))]
            for index in range(batch):
                self.write_out(token + index, taps, values[index : index + tail + 1])
            return tuple(values[batch:])

        def visit_token(index: Array, window: tuple[Array, ...]) -> tuple[Array, ...]:
            values = [*window, self.input(tile.start + index)]
            self.write_out(tile.start + index, taps, values)
            return tuple(values[1:])

        batches = lax.div(tile.length, jnp.int32(batch))
        window = lax.fori_loop(jnp.int32(0), batches, visit_batch, window)
        lax.fori_loop(batches * batch, tile.length, visit_token, window)

    def write_states(self, row: Array, begun: Sequence[Array]) -> None:
        """Writes a row's final state and snapshots; `begun` is its initial state."""
        refs = self.refs
        first, stop = refs["cu_q_lens"][row], refs["cu_q_lens"][row + 1]
        self.write_state_before(stop, refs["write_states"][row], first, begun)
        if "snapshots" not in refs:
            return

        @pl.loop(refs["snapshots"][row], refs["snapshots"][row + 1])
        def _(snapshot: Array) -> None:
            end, state = refs["snapshot_ends"][snapshot], refs["snapshot_states"][snapshot]
            self.write_state_before(end, state, first, begun)

    def write_state_before(
        self, end: Array, state: Array, first: Array, begun: Sequence[Array]
    ) -> None:
        """Writes the last inputs before a token as a state; near the row's start some come from `begun`."""
        tail = self.geometry.tail
        seen = end - first

        @pl.when(self.exists(state))
        def _() -> None:
            values = [self.input(jnp.maximum(end - tail + index, first)) for index in range(tail)]
            for count in range(1, tail):
                for index in range(tail - count):
                    values[index] = jnp.where(seen == count, begun[index + count], values[index])
            self.write_state(state, values)

    def exists(self, state: Array) -> Array:
        """Returns whether the id is a state of the pool."""
        return (state >= 0) & (state < self.refs["states"].shape[0])

    def state(self, row: Array) -> list[Array]:
        """Returns a row's initial state, zeros for an id past the end."""
        read = self.refs["read_states"][row]
        known = self.exists(read)
        place = jnp.where(known, read, 0)
        kept = [
            self.load(self.refs["states"].at[place, index, self.columns])
            for index in range(self.geometry.tail)
        ]
        return [jnp.where(known, part, jnp.zeros_like(part)) for part in kept]

    def write_state(self, state: Array, values: Sequence[Array]) -> None:
        """Writes a state's inputs."""
        for index, value in enumerate(values):
            assign(self.refs["states"], (state, index, self.columns), value)

    def input(self, token: Array) -> Array:
        """Returns a token's inputs."""
        columns = pl.ds(self.geometry.first_channel + self.start, self.width)
        return self.load(self.refs["x"].at[token, columns])

    def load(self, ref: Ref) -> Array:
        """Issues the load of this block's channels of a row."""
        return plgpu.load(ref, layout=self.piece.layout, optimized=False)

    def taps(self) -> list[Array]:
        """Returns the taps in float32, followed by the bias if there is one."""
        rows = [
            self.refs["weight"].at[index, self.columns] for index in range(self.geometry.d_conv)
        ]
        rows += [self.refs["bias"].at[self.columns]] if "bias" in self.refs else []
        return [self.load(row).astype(jnp.float32) for row in rows]

    def weighed(self, taps: Sequence[Array], window: Sequence[Array]) -> Array:
        """Returns a token's outputs in float32; it adds the oldest input first, as the XLA implementation does."""
        total = taps[0] * window[0].astype(jnp.float32)
        for tap, value in zip(taps[1 : len(window)], window[1:], strict=True):
            total += tap * value.astype(jnp.float32)
        total = total + taps[-1] if "bias" in self.refs else total
        return silu(total) if self.geometry.activated else total

    def write_out(self, token: Array, taps: Sequence[Array], window: Sequence[Array]) -> None:
        """Stores a token's outputs."""
        out = self.weighed(taps, window).astype(self.geometry.dtype)
        assign(self.refs["out"], (token, self.columns), out)

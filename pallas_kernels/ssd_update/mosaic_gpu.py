"""`ssd_update` on Hopper with a Mosaic GPU kernel: a block updates some rows of one head's state of one sequence."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.arguments.ssd import Sizes, SsdArrays
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.mosaic.activations import Limits, silu, step_of
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.launch import LANE_PARAMS, mosaic_kernel
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.rows import LOAD_BYTES, Piece, broadcast, load, row_pieces

# Elements of a state that a block holds in registers, 32 per thread; with 64 per thread fewer blocks are resident.
_NUMBERS = 4096
_THREADS = 128
# Least rows of a block, for its register layout.
_LEAST_ROWS = 8
MOST_COLUMNS = 1024
_DTYPES = ("float32", "bfloat16", "float16")


def why_not(states: ArrayOrStruct, xbc: ArrayOrStruct) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(states, xbc)


def refusal(states: ArrayOrStruct, xbc: ArrayOrStruct) -> str | None:
    """Returns why the kernel cannot be built for these arrays, or `None` if it can."""
    for name, array in {"states": states, "xbc": xbc}.items():
        if array.dtype.name not in _DTYPES:
            return f"{name} must be one of {', '.join(_DTYPES)}, got {array.dtype}"
    if states.shape[2] % 8 or states.shape[3] % 8:
        return f"head_dim and d_state must be multiples of 8, got {states.shape[2]} and {states.shape[3]}"
    if states.shape[3] > MOST_COLUMNS:
        return f"d_state must be at most {MOST_COLUMNS}, got {states.shape[3]}"
    return None


def ssd_update(
    layer: SsdArrays,
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    *,
    z: Float[Array, "rows d_inner"] | None = None,
    dt_limits: Limits = (0.0, float("inf")),
    interpret: bool = False,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Implements `api.ssd_update`; negative ids are treated as past the end.

    With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly; races are recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    check_kernel(refusal(layer.states, layer.xbc))
    return update(layer, read_states, write_states, z, dt_limits=dt_limits, interpret=interpret)


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("dt_limits", "interpret"))
def update(
    layer: SsdArrays,
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    z: Float[Array, "rows d_inner"] | None,
    *,
    dt_limits: Limits,
    interpret: bool,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Runs the kernel."""
    a_log, d, dt_bias, states, xbc, dt = layer
    kernel = Kernel(Sizes.of(states, xbc), states.dtype.itemsize, dt_limits, z is not None)
    pool = jax.new_ref(states)
    gate = [] if z is None else [z]
    inputs = (a_log, d, dt_bias, xbc, dt, read_states, write_states, *gate)
    out = mosaic_kernel(
        kernel.body,
        out_type=jax.ShapeDtypeStruct((len(xbc), *states.shape[1:3]), xbc.dtype),
        # All blocks are on one axis: grid axes other than the last are limited to 65535.
        grid=(len(xbc) * kernel.sizes.heads * kernel.shares,),
        grid_names=("block",),
        compiler_params=LANE_PARAMS,
        interpret=interpret,
        kernel_name="ssd_update",
    )(*inputs, pool)
    return out, jax.freeze(pool)


@dataclass(frozen=True)
class Kernel:
    """The kernel for one layer; `itemsize` is the size in bytes of a state's elements."""

    sizes: Sizes
    itemsize: int
    dt_limits: Limits
    gated: bool

    @property
    def rows(self) -> int:
        """Rows of a head's state per block; if possible a multiple of the rows that all threads load at once."""
        most = max(_LEAST_ROWS, _NUMBERS // self.sizes.d_state)
        at_once = _THREADS * (LOAD_BYTES // self.itemsize) // self.columns
        able = [
            rows
            for rows in range(min(most, self.sizes.head_dim), 0, -1)
            if self.sizes.head_dim % rows == 0
        ]
        return next((rows for rows in able if rows % at_once == 0), able[0])

    @property
    def shares(self) -> int:
        """Blocks per head."""
        return self.sizes.head_dim // self.rows

    @property
    def columns(self) -> int:
        """Columns of a state that one load covers, 16 bytes per lane over eight lanes at most."""
        lowest_bit = self.sizes.d_state & -self.sizes.d_state
        return min(lowest_bit, 8 * LOAD_BYTES // self.itemsize)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Register layouts of a block's rows."""
        return row_pieces(self.rows, self.columns, LOAD_BYTES // self.itemsize)

    def body(self, *refs: Ref) -> None:
        """Runs one block."""
        names = ["a_log", "d", "dt_bias", "xbc", "dt", "read_states", "write_states"]
        names += ["z"] * self.gated
        named = dict(zip([*names, "states", "out"], refs, strict=True))
        block = lax.axis_index("block")
        share, head = lax.rem(block, self.shares), lax.div(block, self.shares)
        row, head = lax.div(head, self.sizes.heads), lax.rem(head, self.sizes.heads)
        _Block(self, named, row, head, share * self.rows).run()


class _Loaded(NamedTuple):
    """The loaded arrays of a piece of a state's rows: state, B and C per range of columns, x and z per row."""

    state: list[Array]
    b: list[Array]
    c: list[Array]
    x: Array
    z: Array | None


class _Block:
    """One block, which updates a row's head from row `first` of its state on."""

    def __init__(
        self, kernel: Kernel, refs: Mapping[str, Ref], row: Array, head: Array, first: Array
    ) -> None:
        self.kernel, self.sizes, self.refs = kernel, kernel.sizes, refs
        self.row, self.head, self.first = row, head, first

    def run(self) -> None:
        """Issues all loads, then updates the state and stores state and output."""
        refs, row, head = self.refs, self.row, self.head
        num_states = refs["states"].shape[0]
        read, write = refs["read_states"][row], refs["write_states"][row]
        known = (read >= 0) & (read < num_states)
        loaded = [self.load(piece, jnp.where(known, read, 0)) for piece in self.kernel.pieces]
        rate, skip, bias = (
            refs[name][head].astype(jnp.float32) for name in ("a_log", "d", "dt_bias")
        )
        step = step_of(refs["dt"][row, head], bias, self.kernel.dt_limits)
        kept = jnp.exp(-jnp.exp(rate) * step)
        real = (write >= 0) & (write < num_states)
        for piece, parts in zip(self.kernel.pieces, loaded, strict=True):
            begun = [jnp.where(known, part, 0.0) for part in parts.state]
            ended = self.stepped(piece, begun, parts, kept, step)
            self.write_out(piece, ended, parts, skip, real)
            pl.when(real)(partial(self.write_state, piece, ended, write))

    def load(self, piece: Piece, state: Array) -> _Loaded:
        """Issues the loads of one piece."""
        refs, sizes, layout = self.refs, self.sizes, piece.layout
        rows = pl.ds(self.first + piece.start, piece.size)
        starts = range(0, sizes.d_state, self.kernel.columns)
        spans = [pl.ds(start, self.kernel.columns) for start in starts]
        group = lax.div(self.head, sizes.heads // sizes.groups) * sizes.d_state
        token = refs["xbc"].at[self.row]

        def by_column(first: int) -> list[Array]:
            places = [pl.ds(first + group + start, self.kernel.columns) for start in starts]
            return [_load(token.at[place], layout.reduce(0)) for place in places]

        place = pl.ds(self.head * sizes.head_dim + self.first + piece.start, piece.size)
        by_row = layout.reduce(1)
        return _Loaded(
            [_load(refs["states"].at[state, self.head, rows, span], layout) for span in spans],
            by_column(sizes.d_inner),
            by_column(sizes.first_c),
            _load(token.at[place], by_row),
            _load(refs["z"].at[self.row, place], by_row) if self.kernel.gated else None,
        )

    def stepped(
        self, piece: Piece, begun: list[Array], parts: _Loaded, kept: Array, step: Array
    ) -> list[Array]:
        """Returns the state after the token, per range of columns."""
        shape = begun[0].shape
        added = broadcast(parts.x * step, shape, 0, piece.layout)
        return [
            state * kept + added * broadcast(b, shape, 1, piece.layout)
            for state, b in zip(begun, parts.b, strict=True)
        ]

    def write_out(
        self, piece: Piece, ended: list[Array], parts: _Loaded, skip: Array, real: Array
    ) -> None:
        """Computes the output from the state and stores it, zeros for padding."""
        shape = ended[0].shape
        read = [
            state * broadcast(c, shape, 1, piece.layout)
            for state, c in zip(ended, parts.c, strict=True)
        ]
        out = jnp.sum(reduce(jnp.add, read), axis=1) + skip * parts.x
        if parts.z is not None:
            out *= silu(parts.z)
        ref = self.refs["out"]
        place = pl.ds(self.first + piece.start, piece.size)
        assign(ref, (self.row, self.head, place), jnp.where(real, out, 0.0).astype(ref.dtype))

    def write_state(self, piece: Piece, ended: list[Array], write: Array) -> None:
        """Stores the state."""
        pool, width = self.refs["states"], self.kernel.columns
        rows = pl.ds(self.first + piece.start, piece.size)
        for index, part in enumerate(ended):
            columns = pl.ds(index * width, width)
            assign(pool, (write, self.head, rows, columns), part.astype(pool.dtype))


def _load(ref: Ref, layout: Layout) -> Array:
    return load(ref, layout).astype(jnp.float32)

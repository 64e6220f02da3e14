"""`delta_update` on Hopper with a Mosaic GPU kernel: a block updates columns of one head's state of one sequence."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.arguments.delta import NORM_EPS, DeltaArrays, DeltaSizes
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.mosaic.activations import sigmoid, softplus
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.launch import LANE_PARAMS, mosaic_kernel
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.rows import Piece, broadcast, load, row_pieces

# Bytes of each row of the state that a block updates: a cache line.
_LINE_BYTES = 128
# Elements of a state that a block holds in registers, 32 per thread; with 64 per thread fewer blocks are resident.
_NUMBERS = 4096
_THREADS = 128
_LEAST_COLUMNS = 8
MOST_ROWS = _NUMBERS // _LEAST_COLUMNS
# Adjacent elements per thread: Mosaic's sums across warps take at most 16 bytes of float32 per thread.
_VECTOR = 4
_DTYPES = ("float32", "bfloat16", "float16")


def why_not(states: ArrayOrStruct, qkv: ArrayOrStruct) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(states, qkv)


def refusal(states: ArrayOrStruct, qkv: ArrayOrStruct) -> str | None:
    """Returns why the kernel cannot be built for these arrays, or `None` if it can."""
    for name, array in {"states": states, "qkv": qkv}.items():
        if array.dtype.name not in _DTYPES:
            return f"{name} must be one of {', '.join(_DTYPES)}, got {array.dtype}"
    kernel = Kernel(DeltaSizes.of(states, qkv), states.dtype.itemsize)
    key_dim, value_dim = states.shape[2:]
    if value_dim % _LEAST_COLUMNS:
        return f"value_dim must be a multiple of {_LEAST_COLUMNS}, got {value_dim}"
    if key_dim > MOST_ROWS:
        return f"key_dim must be at most {MOST_ROWS}, got {key_dim}"
    if len(kernel.pieces) > 1:
        return (
            f"key_dim must be a power of two or a multiple of {kernel.rows_at_once}, got {key_dim}"
        )
    return None


def delta_update(
    layer: DeltaArrays,
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "rows heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Implements `api.delta_update`; negative ids are treated as past the end.

    With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly; races are recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    check_kernel(layer.refusal() or refusal(layer.states, layer.qkv))
    return update(layer, read_states, write_states, interpret=interpret)


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("interpret",))
def update(
    layer: DeltaArrays,
    read_states: Int[Array, " rows"],
    write_states: Int[Array, " rows"],
    *,
    interpret: bool,
) -> tuple[Float[Array, "rows heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Runs the kernel."""
    a_log, dt_bias, states, qkv, a, b = layer
    kernel = Kernel(DeltaSizes.of(states, qkv), states.dtype.itemsize)
    sizes, pool = kernel.sizes, jax.new_ref(states)
    out = mosaic_kernel(
        kernel.body,
        out_type=jax.ShapeDtypeStruct((len(qkv), sizes.heads, sizes.value_dim), qkv.dtype),
        # All blocks are on one axis: grid axes other than the last are limited to 65535.
        grid=(len(qkv) * sizes.heads * kernel.shares,),
        grid_names=("block",),
        compiler_params=LANE_PARAMS,
        interpret=interpret,
        kernel_name="delta_update",
    )(a_log, dt_bias, qkv, a, b, read_states, write_states, pool)
    return out, jax.freeze(pool)


@dataclass(frozen=True)
class Kernel:
    """The kernel for one layer; `itemsize` is the size in bytes of a state's elements."""

    sizes: DeltaSizes
    itemsize: int

    @property
    def columns(self) -> int:
        """Columns of a head's state per block, a power of two."""
        value_dim, most = self.sizes.value_dim, _LINE_BYTES // self.itemsize
        while most > _LEAST_COLUMNS and most * self.sizes.key_dim > _NUMBERS:
            most //= 2
        return min(value_dim & -value_dim, most)

    @property
    def rows_at_once(self) -> int:
        """Rows of a state that all threads load at once."""
        return _THREADS * _VECTOR // self.columns

    @property
    def shares(self) -> int:
        """Blocks per head."""
        return self.sizes.value_dim // self.columns

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Register layouts of a block's rows; the kernel supports sizes with only one."""
        return row_pieces(self.sizes.key_dim, self.columns, _VECTOR)

    def body(self, *refs: Ref) -> None:
        """Runs one block."""
        names = ["a_log", "dt_bias", "qkv", "a", "b", "read_states", "write_states"]
        named = dict(zip([*names, "states", "out"], refs, strict=True))
        block = lax.axis_index("block")
        share, head = lax.rem(block, self.shares), lax.div(block, self.shares)
        row, head = lax.div(head, self.sizes.heads), lax.rem(head, self.sizes.heads)
        _Block(self, named, row, head, share * self.columns).run()


class _Block:
    """One block, which updates `kernel.columns` columns of a row's head from column `first` on.

    Each column of the state is updated alone, so blocks share nothing.
    """

    def __init__(
        self, kernel: Kernel, refs: Mapping[str, Ref], row: Array, head: Array, first: Array
    ) -> None:
        self.sizes, self.refs = kernel.sizes, refs
        self.row, self.head = row, head
        self.columns = pl.ds(first, kernel.columns)
        self.shape = (self.sizes.key_dim, kernel.columns)
        self.first_value = 2 * self.sizes.key_heads * self.sizes.key_dim + first
        (piece,) = kernel.pieces
        self.layout = piece.layout

    def run(self) -> None:
        """Issues all loads, then updates the state and stores state and output."""
        refs, sizes, row, head = self.refs, self.sizes, self.row, self.head
        num_states = refs["states"].shape[0]
        read, write = refs["read_states"][row], refs["write_states"][row]
        known = (read >= 0) & (read < num_states)
        state = _load(self.place(jnp.where(known, read, 0)), self.layout)
        served = lax.div(head, sizes.heads // sizes.key_heads) * sizes.key_dim
        q = self.load_token(served, sizes.key_dim, self.layout.reduce(1))
        k = self.load_token(
            sizes.key_heads * sizes.key_dim + served, sizes.key_dim, self.layout.reduce(1)
        )
        value = self.first_value + head * sizes.value_dim
        v = self.load_token(value, self.shape[1], self.layout.reduce(0))
        rate, bias, a, b = (
            ref.astype(jnp.float32)
            for ref in (
                refs["a_log"][head],
                refs["dt_bias"][head],
                refs["a"][row, head],
                refs["b"][row, head],
            )
        )
        kept = jnp.exp(-jnp.exp(rate) * softplus(a + bias))
        q, k = self.over_columns(_unit(q) * sizes.key_dim**-0.5), self.over_columns(_unit(k))
        state = jnp.where(known, state, 0.0) * kept
        correction = (v - jnp.sum(state * k, axis=0)) * sigmoid(b)
        state += k * broadcast(correction, self.shape, 1, self.layout)
        real = (write >= 0) & (write < num_states)
        out = jnp.where(real, jnp.sum(state * q, axis=0), 0.0)
        assign(refs["out"], (row, head, self.columns), out.astype(refs["out"].dtype))

        @pl.when(real)
        def _() -> None:
            assign(self.place(write), ..., state.astype(refs["states"].dtype))

    def place(self, state: Array) -> Ref:
        """Returns a ref to the block's columns of a state."""
        return self.refs["states"].at[state, self.head, pl.ds(0, self.sizes.key_dim), self.columns]

    def load_token(self, first: Array, size: int, layout: Layout) -> Array:
        """Loads components of the row's queries, keys or values."""
        return _load(self.refs["qkv"].at[self.row, pl.ds(first, size)], layout)

    def over_columns(self, vector: Array) -> Array:
        """Repeats one value per row of the state over the block's columns."""
        return broadcast(vector, self.shape, 0, self.layout)


def _load(ref: Ref, layout: Layout) -> Array:
    return load(ref, layout).astype(jnp.float32)


def _unit(x: Array) -> Array:
    """Returns an L2-normalised vector."""
    return x * lax.rsqrt(jnp.sum(x * x) + NORM_EPS)

"""A Mosaic GPU kernel that solves each piece's triangular system, for the `delta_scan` kernel.

A block processes one piece for one key head and the value heads that it serves. Within a piece, with S the state before
it, `passed` the log decay up to and including a token, and D[i, j] = exp(passed[i] - passed[j]), the corrections C of
the delta rule solve (1 + A) C = beta * (V - exp(passed) * K S), where A is the strict lower triangle of
beta[i] * (K K^T * D)[i, j] (Yang et al., arXiv:2406.06484 and arXiv:2412.06464). The kernel writes the inverse of 1 + A
with beta included, and the weights of C in the outputs, the lower triangle of Q K^T * D. Lengths of queries and keys
are factors of rows and columns, so that products have exact inputs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from pallas_kernels.arguments.delta import NORM_EPS
from pallas_kernels.delta_scan.mosaic_geometry import SIDE
from pallas_kernels.delta_scan.mosaic_inverse import invert
from pallas_kernels.delta_scan.mosaic_kernel import SQUARE, TILED, Kernel, zeros
from pallas_kernels.mosaic.accumulators import add_product, wait_for_products
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.launch import mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import broadcast, load
from pallas_kernels.mosaic.tiles import PER_COLUMN, PER_ROW, WGMMA
from pallas_kernels.packed.rows import Pieces

READ, KNOWN, LEFT, ENDED = range(4)
"""Rows of the table of factors: of a query's product with the state before the piece, of a key's, of a key in the state
after the piece, and of the state itself (in all columns)."""
FACTORS = 4


def systems(
    kernel: Kernel,
    qkv: Float[Array, "tokens wide"],
    gates: Float[Array, "pieces heads 2 size"],
    pieces: Pieces,
) -> tuple[
    Float[Array, "pieces heads size size"],
    Float[Array, "pieces heads size size"],
    Float[Array, "pieces heads factors_by_size"],
]:
    """Returns the inverses, the weights and the factors of each piece and head; unused pieces have arbitrary values.

    Args:
        kernel: sizes.
        qkv: the tokens, with 64 further ones for the interpreter.
        gates: each token's base-2 log decay, at least -160, and beta; 0 past the end of a piece.
        pieces: the pieces of 64 tokens.
    """
    g = kernel.geometry
    count, heads = gates.shape[:2]
    square = jax.ShapeDtypeStruct((count, heads, *SQUARE), g.dtype)
    vectors = jax.ShapeDtypeStruct((count, heads, FACTORS * SIDE), jnp.float32)
    shared = {
        "q": kernel.squares(g.squares),
        "k": kernel.squares(g.squares),
        "gates": plgpu.SMEM((g.served, 2, SIDE), jnp.float32),
        "vectors": plgpu.SMEM((1 + g.served, SIDE), jnp.float32),
        "systems": plgpu.SMEM((g.served, *SQUARE), jnp.float32),
        "weights": plgpu.SMEM((g.served, *SQUARE), g.dtype, transforms=TILED),
        "inverses": plgpu.SMEM((g.served, *SQUARE), g.dtype),
        "arrived": plgpu.Barrier(num_arrivals=2 * g.squares + 1),
    }
    if kernel.interpret:
        # The interpreter does not support accumulators.
        shared["sums"] = plgpu.SMEM((2, *SQUARE), jnp.float32)
    inverses, weights, factors = mosaic_kernel(
        partial(_run_block, kernel),
        out_type=[square, square, vectors],
        scratch_types=shared,
        grid=(count * g.sizes.key_heads,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
        ),
        interpret=kernel.interpret,
        kernel_name="delta_systems",
    )(qkv, gates, pieces.start, pieces.length)
    return inverses, weights, factors


_over_columns = partial(broadcast, shape=SQUARE, axis=0, layout=WGMMA)
_over_rows = partial(broadcast, shape=SQUARE, axis=1, layout=WGMMA)


def _index(axis: int) -> Array:
    """Returns each element's row or column."""
    return plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=WGMMA)


def _run_block(kernel: Kernel, *refs: Ref, **scratch: Ref) -> None:
    """Computes one piece for one key head."""
    names = ("qkv", "gates_of", "start", "length", "inverses_of", "weights_of", "factors_of")
    found = kernel.named(dict(zip(names, refs, strict=True)) | scratch, "q", "k")
    _Block(kernel, found).run()


class _Block:
    """One piece for one key head."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref]) -> None:
        self.kernel, self.geometry, self.refs = kernel, kernel.geometry, dict(refs)
        key_heads = jnp.int32(self.geometry.sizes.key_heads)
        block = lax.axis_index("block")
        self.piece, self.key_head = lax.div(block, key_heads), lax.rem(block, key_heads)
        self.first_head = self.key_head * self.geometry.served
        self.length = refs["length"][self.piece]

    def run(self) -> None:
        """Processes the piece, unless it is unused."""

        @pl.when(self.length > 0)
        def _() -> None:
            self.fetch()
            plgpu.barrier_wait(self.refs["arrived"])
            self.with_sums(self.solve)

    def fetch(self) -> None:
        """Starts the copies of queries, keys and gates."""
        refs, g = self.refs, self.geometry
        start = refs["start"][self.piece]
        for square in range(g.squares):
            column = self.key_head * g.sizes.key_dim + square * SIDE
            for name, first in (("q_copied", 0), ("k_copied", g.first_key)):
                target = refs[name].at[square]
                self.kernel.copy(refs, start, first + column, target, refs["arrived"])
        gates = refs["gates_of"].at[self.piece, pl.ds(self.first_head, g.served)]
        plgpu.copy_gmem_to_smem(gates, refs["gates"], refs["arrived"])

    def with_sums(self, run: Callable[..., None]) -> None:
        """Calls a function with two accumulators."""
        if not self.kernel.interpret:
            pl.run_scoped(run, *[plgpu.ACC(SQUARE, jnp.float32)] * 2)
            return
        run(*(self.refs["sums"].at[index] for index in range(2)))

    def solve(self, of_keys: Ref, of_queries: Ref) -> None:
        """Multiplies keys and queries with keys, and processes the heads that they serve."""
        refs, interpret = self.refs, self.kernel.interpret
        for name, total in (("k", of_keys), ("q", of_queries)):
            if interpret:
                total[...] = zeros()
            for square in range(self.geometry.squares):
                pair = refs[name].at[square], refs["k"].at[square]
                add_product(total, *pair, transposed=True, interpret=interpret)
        q = self.inverse_lengths("q") * self.geometry.sizes.key_dim**-0.5
        k = self.inverse_lengths("k")
        assign(refs["vectors"], 0, k)
        keys = wait_for_products(of_keys, 1, interpret=interpret)
        queries = wait_for_products(of_queries, 0, interpret=interpret)
        for number in range(self.geometry.served):
            self.process(number, keys, queries, k, q)
        # Systems, inverses and weights are visible to all warps and to copies after these barriers.
        plgpu.commit_smem()
        invert(
            refs["systems"],
            refs["gates"].at[:, 1],
            refs["inverses"],
            interpret=interpret,
        )
        plgpu.commit_smem()
        for name in ("inverses", "weights"):
            target = refs[f"{name}_of"].at[self.piece, pl.ds(self.first_head, self.geometry.served)]
            plgpu.copy_smem_to_gmem(refs[name], target)
        plgpu.wait_smem_to_gmem(0)

    def inverse_lengths(self, name: str) -> Array:
        """Returns the inverse length of each token's query or key, 0 past the piece's end."""
        total = 0.0
        for square in range(self.geometry.squares):
            part = plgpu.load(self.refs[name].at[square], layout=WGMMA).astype(jnp.float32)
            total += jnp.sum(part * part, axis=1)
        return jnp.where(self.row() < self.length, lax.rsqrt(total + NORM_EPS), 0.0)

    def row(self) -> Array:
        """Returns the index of each token."""
        return plgpu.broadcasted_iota(jnp.int32, (SIDE,), 0, layout=PER_ROW)

    def process(self, number: int, keys: Array, queries: Array, k: Array, q: Array) -> None:
        """Stores a head's factors, and puts its system and its weights in shared memory."""
        passed = self.passed(number)
        held = self.refs["vectors"].at[1 + number]
        assign(held, ..., passed)
        plgpu.commit_smem()
        end = self.refs["vectors"][1 + number, SIDE - 1]
        self.store_factors(number, passed, end, k, q)
        columns = load(held, PER_COLUMN)
        lengths, beta = load(self.refs["vectors"].at[0], PER_COLUMN), self.beta(number)
        row, column = _index(0), _index(1)
        distance = _over_columns(passed) - _over_rows(columns)
        inside = row < self.length
        weights = queries * _over_columns(q) * _over_rows(lengths) * jnp.exp2(distance)
        weights = jnp.where((column <= row) & inside, weights, 0.0)
        assign(self.refs["weights"], number, weights.astype(self.geometry.dtype))
        # The transpose: products of keys are symmetric.
        system = keys * _over_columns(-k) * _over_rows(lengths * beta) * jnp.exp2(-distance)
        system = jnp.where((row < column) & (column < self.length), system, 0.0)
        assign(self.refs["systems"], number, system)

    def passed(self, number: int) -> Array:
        """Returns the base-2 log decay of the state up to and including each token."""
        decay = _over_rows(load(self.refs["gates"].at[number, 0], PER_COLUMN))
        return jnp.sum(jnp.where(_index(1) <= _index(0), decay, 0.0), axis=1)

    def beta(self, number: int) -> Array:
        """Returns the strength of each token's correction, per column."""
        return load(self.refs["gates"].at[number, 1], PER_COLUMN)

    def store_factors(self, number: int, passed: Array, end: Array, k: Array, q: Array) -> None:
        """Writes the head's factors of queries, keys and the state."""
        decay = jnp.exp2(passed)
        factors: dict[int, Any] = {
            READ: q * decay,
            KNOWN: k * decay,
            LEFT: k * jnp.exp2(end - passed),
            ENDED: plgpu.layout_cast(jnp.full(SIDE, jnp.exp2(end)), PER_ROW),
        }
        place = self.refs["factors_of"].at[self.piece, self.first_head + number]
        for row, values in factors.items():
            assign(place.at[pl.ds(row * SIDE, SIDE)], ..., values)

"""The Mosaic GPU kernel that scores keys of 8 bits: a block multiplies a run of a row's pages with one tile of queries.

Keys are the left operand, 64 at a time, and the heads of one query the right one, so that what a key scores is a sum
along a row of the product, most of which lies in one thread.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32, Int, Shaped, UInt8

from pallas_kernels.device import NUM_MULTIPROCESSORS
from pallas_kernels.mosaic_rows import INTERPRETED
from pallas_kernels.mosaic_warps import load_floats
from pallas_kernels.query_tiles import Tiles

Ref = Any
# What makes transforms whole classes is private to JAX.
_transform: Any = plgpu

TILE = 64
DIM = 128
STAGES = 6
_ROW_TILE = 8
_WGMMA = plgpu.Layout.WGMMA
_SCALE_BYTES = 4


def refusal(q: Array, index_pages: Array) -> str | None:
    """Returns why the kernel cannot be built for these arrays, or `None` if it can."""
    if q.dtype != jnp.float8_e4m3fn or index_pages.dtype != jnp.uint8:
        return (
            f"queries must be float8_e4m3fn and pages uint8, got {q.dtype} and {index_pages.dtype}"
        )
    if q.shape[2] != DIM or q.shape[1] % 8 or q.shape[1] > 128:
        return (
            f"queries must have up to 128 heads, a multiple of 8, of {DIM}, got {list(q.shape[1:])}"
        )
    if index_pages.shape[1] % TILE:
        return f"page_size must be a multiple of {TILE}, got {index_pages.shape[1]}"
    return None


@partial(jax.jit, static_argnames=("tile_size", "keys", "interpret"))
def score(
    q: Shaped[Array, "tokens index_heads index_dim"],
    weights: Float32[Array, "tokens index_heads"],
    index_pages: UInt8[Array, "pages page_size width"],
    page_table: Int[Array, "rows table_width"],
    tiles: Tiles,
    *,
    tile_size: int,
    keys: int,
    interpret: bool = False,
) -> Float32[Array, "tokens keys"]:
    """Returns the scores of the keys that each query sees, NaN as +inf; the others may hold anything.

    Args:
        q: float8_e4m3fn.
        weights: of the heads.
        index_pages: pages of bytes.
        page_table: int32.
        tiles: which queries go together.
        tile_size: queries of a tile at most.
        keys: width of the result, at least that of the page table in keys.
        interpret: run on the CPU, slowly.
    """
    tokens, heads, _ = q.shape
    num_pages, page_size, width = index_pages.shape
    token = tiles.first_token[:, None] + jnp.arange(tile_size, dtype=jnp.int32)[None, :]
    flat = index_pages.reshape(num_pages, page_size * width)
    numbers = lax.bitcast_convert_type(flat, jnp.float8_e4m3fn)
    # Rows of 128 bytes: the keys, and behind them the scales.
    rows = page_size * width // DIM
    by_twos = (rows,) if interpret else (rows // 2, 2)
    num_tiles = len(tiles.row)
    shares = max(1, 4 * NUM_MULTIPROCESSORS // num_tiles)
    shares = min(shares, max(1, page_table.shape[1] * page_size // (4 * TILE)))
    needed = jnp.where(tiles.num_queries > 0, tiles.first_position + tiles.num_queries, 0)
    swizzled = (_transform.TilingTransform((_ROW_TILE, DIM)), _transform.SwizzleTransform(DIM))
    tile = plgpu.SMEM((STAGES, TILE, DIM), jnp.float8_e4m3fn, transforms=swizzled)
    # A page's rows are no multiple of the eight that a tile of an operand has. As pairs they lie where its rows do.
    pairs = plgpu.SMEM(
        (STAGES, TILE // 2, 2, DIM),
        jnp.float8_e4m3fn,
        transforms=(_transform.SwizzleTransform(DIM),),
    )
    shared = {
        "keys": tile if interpret else plgpu.RefUnion(tile, pairs),
        "scales": plgpu.SMEM((STAGES, TILE * _SCALE_BYTES), jnp.uint8),
        "queries": plgpu.SMEM((tile_size * heads, DIM), jnp.float8_e4m3fn, transforms=swizzled),
        "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "q_arrived": plgpu.Barrier(),
        "read": plgpu.Barrier(),
    }
    names = ("q", "weights", "numbers", "bytes", "page_table", "row", "first", "count", "needed")

    def body(*refs: Ref) -> None:
        named = dict(zip((*names, "scores", *shared), refs, strict=True))
        _Block(named, tile_size=tile_size, page_size=page_size, interpret=interpret).run()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, keys), jnp.float32),
        grid=(num_tiles, shares),
        grid_names=("tile", "share"),
        scratch_types=tuple(shared.values()),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=INTERPRETED if interpret else None,
        kernel_name="index_scores",
    )(
        q.at[token].get(mode="clip").reshape(num_tiles, tile_size * heads, DIM),
        weights.at[token].get(mode="clip").reshape(num_tiles, tile_size * heads),
        numbers.reshape(num_pages, *by_twos, DIM),
        flat,
        page_table,
        tiles.row,
        tiles.first_token,
        tiles.num_queries,
        needed,
    )


class _Block:
    """One block at work on its share of a tile's keys."""

    def __init__(
        self, refs: Mapping[str, Ref], *, tile_size: int, page_size: int, interpret: bool
    ) -> None:
        self.refs, self.interpret = dict(refs), interpret
        self.keys = self.landing = refs["keys"]
        if not interpret:
            self.keys, self.landing = refs["keys"]
        self.tile_size, self.page_size = tile_size, page_size
        self.heads = refs["weights"].shape[1] // tile_size
        self.tile = lax.axis_index("tile")
        self.row = refs["row"][self.tile]

    def run(self) -> None:
        """Scores the share's tiles of keys, one after the other; some are on their way meanwhile."""
        count = lax.div(self.refs["needed"][self.tile] + TILE - 1, TILE)
        shares = lax.axis_size("share")
        per_share = lax.div(count + shares - 1, shares)
        start = lax.axis_index("share") * per_share
        stop = jnp.minimum(start + per_share, count)

        @pl.when(start < stop)
        def _() -> None:
            refs = self.refs
            plgpu.copy_gmem_to_smem(refs["q"].at[self.tile], refs["queries"], refs["q_arrived"])
            for slot in range(STAGES):
                pl.when(start + slot < stop)(partial(self.fetch, start + slot, slot))
            by_column = _WGMMA.reduce(0)
            weights = [
                plgpu.load(
                    refs["weights"].at[self.tile, pl.ds(query * self.heads, self.heads)],
                    layout=by_column,
                    optimized=False,
                )
                for query in range(self.tile_size)
            ]
            plgpu.barrier_wait(refs["q_arrived"])

            def visit(tile: Array, state: list[Array]) -> list[Array]:
                self.visit(tile, lax.rem(tile - start, STAGES), stop, state)
                return state

            lax.fori_loop(start, stop, visit, weights)

    def fetch(self, tile: Array, slot: Array | int) -> None:
        """Sends for a tile of keys and its scales."""
        refs, per_page = self.refs, self.page_size // TILE
        page = refs["page_table"][self.row, lax.div(tile, per_page)]
        part = lax.rem(tile, per_page)
        arrived = refs["arrived"].at[slot]
        height = self.landing.shape[1]
        rows = pl.ds(pl.multiple_of(part * height, height), height)
        plgpu.copy_gmem_to_smem(refs["numbers"].at[page, rows], self.landing.at[slot], arrived)
        place = pl.ds(self.page_size * DIM + part * (TILE * _SCALE_BYTES), TILE * _SCALE_BYTES)
        plgpu.copy_gmem_to_smem(refs["bytes"].at[page, place], refs["scales"].at[slot], arrived)

    def visit(self, tile: Array, slot: Array, stop: Array, weights: list[Array]) -> None:
        """Scores one tile of keys for all queries, and sends for the one that takes its slot."""
        refs = self.refs
        plgpu.barrier_wait(refs["arrived"].at[slot])
        scales = load_floats(
            refs["scales"].at[slot], TILE, layout=_WGMMA.reduce(1), interpret=self.interpret
        )
        scores = [
            self.score(self.keys.at[slot], query, weight) * scales
            for query, weight in enumerate(weights)
        ]
        # The scales were read by threads, and what takes their place comes by another way.
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["read"])
        plgpu.barrier_wait(refs["read"])
        pl.when(tile + STAGES < stop)(partial(self.fetch, tile + STAGES, slot))
        first, count = refs["first"][self.tile], refs["count"][self.tile]
        for query, found in enumerate(scores):
            is_number = found == found
            pl.when(query < count)(
                partial(self.store, first + query, tile, jnp.where(is_number, found, float("inf")))
            )

    def store(self, token: Array, tile: Array, found: Array) -> None:
        """Writes what a tile of keys scores."""
        self.refs["scores"][token, pl.ds(tile * TILE, TILE)] = found

    def score(self, keys: Ref, query: int, weights: Array) -> Array:
        """Returns the sum over the heads of one query, before scales."""
        queries = self.refs["queries"].at[pl.ds(query * self.heads, self.heads)]

        def multiply(product: Ref) -> Array:
            plgpu.wgmma(product, keys, queries.transpose((1, 0)))
            return product[...]

        products = pl.run_scoped(multiply, plgpu.ACC((TILE, self.heads), jnp.float32))
        weights = lax.broadcast_in_dim(weights, products.shape, [1])
        weights = plgpu.layout_cast(weights, _WGMMA)
        return jnp.sum(jnp.maximum(products, 0.0) * weights, axis=1)

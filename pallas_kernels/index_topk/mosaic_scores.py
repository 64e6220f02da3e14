"""The Mosaic GPU kernel for scores of float8 keys: a block multiplies a run of a row's pages with one tile of queries.

Keys are the left operand, 64 at a time, and the heads of a tile's queries the right one. So a key's score is a sum
along a row of the product, most of which is in one thread. A score has the same bits however queries are packed.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import MOST_ON_AN_AXIS, NUM_MULTIPROCESSORS
from pallas_kernels.index_topk.arguments import IndexArrays
from pallas_kernels.index_topk.scoring import tiles_of
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.launch import LANE_PARAMS, mosaic_kernel
from pallas_kernels.mosaic.loads import load_floats
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.products import ROWS, TRANSFORMS, WIDTH, start_product, wait_for
from pallas_kernels.mosaic.tiles import WGMMA

TILE, DIM = ROWS, WIDTH
_SCALE_BYTES = 4

# Most columns of a product; with more, registers spill.
_COLUMNS = 128
# Most packed queries per tile; they share the keys that are read.
_TOGETHER = 2
# Parts of the contracted dimension, which are added in float32 (`mosaic/products.py`).
_PARTS = 2
# Pipeline stages: tiles of keys in flight per warpgroup. With six, fewer than four blocks fit on an SM, and the grid
# takes a second wave.
_STAGES = 4
# Up to `_NARROW` columns a block has one warpgroup, and `_BLOCKS` blocks are resident per SM. With more columns a block
# has three warpgroups and an SM to itself. (In blocks of one warpgroup the compiler would assign more registers per
# thread than three resident blocks can have.)
_NARROW, _BLOCKS, _WARPGROUPS = 64, 4, 3


def refusal(q: ArrayOrStruct, index_pages: ArrayOrStruct) -> str | None:
    """Returns why the kernel cannot be built for these arrays, or `None` if it can."""
    if q.dtype != jnp.float8_e4m3fn or index_pages.dtype != jnp.uint8:
        return (
            f"queries must be float8_e4m3fn and pages uint8, got {q.dtype} and {index_pages.dtype}"
        )
    if q.shape[2] != DIM or q.shape[1] % 8 or q.shape[1] > _COLUMNS:
        return f"queries must have up to {_COLUMNS} heads, a multiple of 8, of {DIM}, got {list(q.shape[1:])}"
    if q.shape[0] > MOST_ON_AN_AXIS:
        return f"at most {MOST_ON_AN_AXIS} queries in a call, got {q.shape[0]}"
    if index_pages.shape[1] % TILE:
        return f"page_size must be a multiple of {TILE}, got {index_pages.shape[1]}"
    return None


@partial(jax.jit, static_argnames=("keys", "interpret"))
def score(
    given: IndexArrays,
    *,
    keys: int,
    interpret: bool = False,
) -> Float32[Array, "tokens keys"]:
    """Returns the scores of the keys that each query sees, with NaN as +inf; the scores of other keys are undefined.

    Args:
        given: the arrays of a call, with float8_e4m3fn queries and uint8 pages.
        keys: columns of the result, at least the capacity of the page table in keys.
        interpret: whether to run in Pallas's interpreter on the CPU, slowly.
    """
    arrays = _queries(given) | _pages(given.index_pages, interpret=interpret)
    arrays |= {"page_table": given.page_table}
    num_tiles, columns, _ = arrays["q"].shape
    q, page_size = given.q, given.index_pages.shape[1]
    warpgroups, blocks = (1, _BLOCKS) if columns <= _NARROW else (_WARPGROUPS, 1)
    shares = max(1, blocks * NUM_MULTIPROCESSORS // num_tiles)
    shares = min(shares, max(1, given.capacity // (4 * TILE * warpgroups)))
    shared = _shared(columns, warpgroups, interpret=interpret)

    def body(*refs: Ref) -> None:
        named = dict(zip((*arrays, "scores", *shared), refs, strict=True))
        _Block(named, heads=q.shape[1], page_size=page_size, interpret=interpret).run()

    return mosaic_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(q), keys), jnp.float32),
        grid=(num_tiles, shares),
        grid_names=("tile", "share"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(shared.values()),
        compiler_params=LANE_PARAMS,
        interpret=interpret,
        kernel_name="index_scores",
    )(*arrays.values())


def _queries(given: IndexArrays) -> dict[str, Array]:
    """Returns by name the queries and weights of each tile, its row and tokens, and the number of keys to score."""
    q, weights, *_, seq_lens, cu_q_lens = given
    if cu_q_lens is None:
        # Each row is a tile of one query, which is read in place.
        return {"q": q, "weights": weights, "needed": seq_lens}
    tokens, heads, _ = q.shape
    tile_size = min(_TOGETHER, _COLUMNS // heads, tokens)
    tiles = tiles_of(tokens, seq_lens, cu_q_lens, tile_size)
    token = tiles.first_token[:, None] + jnp.arange(tile_size, dtype=jnp.int32)[None, :]
    needed = tiles.first_position + tiles.num_queries
    return {
        "q": q.at[token].get(mode="clip").reshape(len(token), tile_size * heads, DIM),
        "weights": weights.at[token].get(mode="clip").reshape(len(token), tile_size * heads),
        "needed": jnp.where(tiles.num_queries > 0, needed, 0),
        "row": tiles.row,
        "first": tiles.first_token,
        "count": tiles.num_queries,
    }


def _pages(index_pages: Array, *, interpret: bool) -> dict[str, Array]:
    """Returns two views of the pool: "numbers", rows of 128 float8 elements (keys, then scales), and "bytes"."""
    num_pages, page_size, width = index_pages.shape
    flat = index_pages.reshape(num_pages, page_size * width)
    numbers = lax.bitcast_convert_type(flat, jnp.float8_e4m3fn)
    rows = page_size * width // DIM
    # The number of a page's rows is not a multiple of the operand tile's eight rows. Pairs of rows land in shared
    # memory in the layout of the tile's rows.
    by_twos = (rows,) if interpret else (rows // 2, 2)
    return {"numbers": numbers.reshape(num_pages, *by_twos, DIM), "bytes": flat}


def _shared(columns: int, warpgroups: int, *, interpret: bool) -> dict[str, Any]:
    """Returns a block's shared memory; tiles of keys have a second view, into which TMA copies pairs of rows."""
    fp8, slots = jnp.float8_e4m3fn, warpgroups * _STAGES
    keys = plgpu.SMEM((slots, TILE, DIM), fp8, transforms=TRANSFORMS)
    pairs = plgpu.SMEM((slots, TILE // 2, 2, DIM), fp8, transforms=TRANSFORMS[1:])
    return {
        "keys": keys if interpret else plgpu.RefUnion(keys, pairs),
        "scales": plgpu.SMEM((slots, TILE * _SCALE_BYTES), jnp.uint8),
        "queries": plgpu.SMEM((columns, DIM), fp8, transforms=TRANSFORMS),
        "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        "q_arrived": plgpu.Barrier(),
        "read": plgpu.Barrier(num_barriers=warpgroups),
    }


class _Block:
    """One block, which scores its share of the keys for one tile of queries; warpgroups have equal parts."""

    def __init__(
        self, refs: Mapping[str, Ref], *, heads: int, page_size: int, interpret: bool
    ) -> None:
        self.refs, self.interpret = refs, interpret
        # The interpreter does not support unions.
        self.keys, self.landing = [refs["keys"]] * 2 if interpret else refs["keys"]
        self.heads, self.page_size = heads, page_size
        self.num_queries = refs["weights"].shape[1] // heads
        self.tile, self.warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")
        self.first_slot = self.warpgroup * _STAGES
        # Without these arrays each row is a tile of one query.
        self.row, self.first = (
            refs[name][self.tile] if name in refs else self.tile for name in ("row", "first")
        )
        self.count: Any = refs["count"][self.tile] if "count" in refs else 1

    def run(self) -> None:
        """Scores the warpgroup's tiles of keys, with the next tiles in flight."""
        count = lax.div(self.refs["needed"][self.tile] + TILE - 1, TILE)
        warpgroups = lax.axis_size("warpgroup")
        shares = lax.axis_size("share") * warpgroups
        per_share = lax.div(count + shares - 1, shares)
        start = (lax.axis_index("share") * warpgroups + self.warpgroup) * per_share
        stop = jnp.minimum(start + per_share, count)
        pl.when(start < stop)(partial(self.score_from, start, stop))

    def score_from(self, start: Array, stop: Array) -> None:
        """Scores the tiles of keys [start, stop), at least one."""
        refs, q_arrived = self.refs, self.refs["q_arrived"]

        # Warpgroup 0 has tiles of keys if any other warpgroup has.
        @pl.when(self.warpgroup == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(refs["q"].at[self.tile], refs["queries"], q_arrived)

        for ahead in range(_STAGES):
            fetch = partial(self.fetch, start + ahead, self.first_slot + ahead)
            pl.when(start + ahead < stop)(fetch)
        by_column = WGMMA.reduce(0)
        weights = []
        for query in range(self.num_queries):
            own = refs["weights"].at[self.tile, pl.ds(query * self.heads, self.heads)]
            weights.append(plgpu.load(own, layout=by_column, optimized=False))
        plgpu.barrier_wait(q_arrived)

        def visit(tile: Array, state: list[Array]) -> list[Array]:
            self.visit(tile, self.first_slot + lax.rem(tile - start, _STAGES), stop, state)
            return state

        lax.fori_loop(start, stop, visit, weights)

    def fetch(self, tile: Array, slot: Array | int) -> None:
        """Starts the TMA copies of a tile of keys and its scales into a stage."""
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
        """Scores one tile of keys for all queries, and refills its stage."""
        refs = self.refs
        plgpu.barrier_wait(refs["arrived"].at[slot])
        scales = load_floats(
            refs["scales"].at[slot], TILE, layout=WGMMA.reduce(1), interpret=self.interpret
        )
        scores = [sums * scales for sums in self.sums(self.keys.at[slot], weights)]
        # Threads have read the scales through the generic proxy; TMA overwrites them through the async proxy.
        plgpu.commit_smem()
        # The fence also synchronises the warpgroup's threads, but with it alone prompts take 4% longer.
        read = refs["read"].at[self.warpgroup]
        plgpu.barrier_arrive(read)
        plgpu.barrier_wait(read)
        pl.when(tile + _STAGES < stop)(partial(self.fetch, tile + _STAGES, slot))
        for query, found in enumerate(scores):
            known = jnp.where(found == found, found, float("inf"))
            pl.when(query < self.count)(partial(self.store, self.first + query, tile, known))

    def store(self, token: Array, tile: Array, found: Array) -> None:
        """Writes the scores of a tile of keys for one query."""
        assign(self.refs["scores"], (token, pl.ds(tile * TILE, TILE)), found)

    def sums(self, keys: Ref, weights: list[Array]) -> list[Array]:
        """Returns the weighted sum over heads for each query, without the keys' scales."""
        started = [
            start_product(keys, self.refs["queries"], part, _PARTS, interpret=self.interpret)
            for part in range(_PARTS)
        ]
        first, *others = wait_for(*started, interpret=self.interpret)
        products = sum(others, start=first)
        return [
            _weighed(products[:, query * self.heads : (query + 1) * self.heads], weight)
            for query, weight in enumerate(weights)
        ]


def _weighed(products: Array, weights: Array) -> Array:
    """Returns the weighted sum along each row of relu(products)."""
    wide = lax.broadcast_in_dim(weights, products.shape, [1])
    wide = plgpu.layout_cast(wide, WGMMA)
    return jnp.sum(jnp.maximum(products, 0.0) * wide, axis=1)

"""Paged attention of query tiles in plain XLA with an online softmax: the core of the "xla" implementations.

A tile is a run of consecutive queries of one sequence.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.fixed_order import KEYS, is_fixed

DTYPES = ("float32", "bfloat16", "float16")


def why_not(q: ArrayOrStruct) -> str | None:
    """Returns why plain XLA cannot attend in q's dtype, or `None` if it can."""
    if q.dtype.name in DTYPES:
        return None
    return f"q must be one of {', '.join(DTYPES)}, got {q.dtype.name}"


def output_without_keys(
    q: Float[Array, "queries heads head_dim"],
) -> tuple[Float[Array, "queries heads head_dim"], Float[Array, "queries heads"]]:
    """Returns the output (zeros) and log-sum-exp (-inf) of queries that see no key."""
    return jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)


class Running(NamedTuple):
    """State of the online softmax over the keys so far; `values` is not yet divided by the denominator."""

    maximum: Float[Array, "tiles kv_heads queries group"]
    denominator: Float[Array, "tiles kv_heads queries group"]
    values: Float[Array, "tiles kv_heads queries group head_dim"]


class Keys(NamedTuple):
    """Keys and values, as pools or gathered; 8-bit ones have scales per token and head."""

    k: Shaped[Array, "... kv_heads head_dim"]
    v: Shaped[Array, "... kv_heads head_dim"]
    k_scales: Float[Array, "... kv_heads"] | None
    v_scales: Float[Array, "... kv_heads"] | None


def pools_of(arrays: AttentionArrays) -> Keys:
    """Returns the pools of keys and values of a call."""
    return Keys(arrays.k_pages, arrays.v_pages, arrays.k_scales, arrays.v_scales)


class QueryTiles(NamedTuple):
    """Tiles of queries, each with the page ids of its row, its first position and its number of real queries."""

    q: Float[Array, "tiles queries heads head_dim"]
    page_table: Int[Array, "tiles table_width"]
    first_position: Int[Array, " tiles"]
    num_queries: Int[Array, " tiles"]


def attend_tiles(
    tiled: QueryTiles,
    pools: Keys,
    sinks: Float[Array, " heads"] | None,
    options: ScoreOptions,
    *,
    temporary_bytes: int,
) -> tuple[Float[Array, "tiles queries heads head_dim"], Float[Array, "tiles queries heads"]]:
    """Returns the outputs in float32 and their log-sum-exp; queries from `num_queries` on give zeros and `-inf`.

    Query j of a tile is at position `first_position + j`. If the gathered keys and the scores would take more than
    about `temporary_bytes` bytes, a loop visits the keys in blocks, as many as the longest tile needs. Under the fixed
    order of sums the loop always runs, over blocks at fixed positions; one that a query does not see changes nothing.
    """
    q, page_table, first_position, num_queries = tiled
    window = options.window
    tiles, queries, heads, head_dim = q.shape
    kv_heads = pools.k.shape[2]
    pools, page_table = _with_small_pages(pools, page_table)
    page_size = pools.k.shape[1]
    reach = None if is_fixed() else window
    page_table, first_key = _narrow(page_table, first_position, queries, page_size, reach)
    grouped = q.reshape(tiles, queries, kv_heads, heads // kv_heads, head_dim)
    query = jnp.arange(queries, dtype=jnp.int32)[None, :]
    position = jnp.where(query < num_queries[:, None], first_position[:, None] + query, -1)

    def visit(page_ids: Array, block_start: Array, running: Running) -> Running:
        key = (
            block_start[:, None]
            + jnp.arange(page_ids.shape[1] * page_size, dtype=jnp.int32)[None, :]
        )
        visible = key[:, None, :] <= position[:, :, None]
        if window is not None:
            visible &= key[:, None, :] > position[:, :, None] - window
        keys = jax.tree.map(partial(_gather, page_ids=page_ids), pools)
        return _add_keys(running, grouped, keys, visible, options)

    running = _nothing_yet(grouped)
    width = page_table.shape[1]
    block = _pages_per_block(q, pools.k, temporary_bytes)
    if is_fixed():
        block = max(1, KEYS // page_size)
    elif block >= width:
        return _finish(visit(page_table, first_key, running), sinks)
    page_table = jnp.pad(page_table, ((0, 0), (0, -width % block)), mode="edge")

    def visit_block(index: Array, running: Running) -> Running:
        page_ids = jax.lax.dynamic_slice_in_dim(page_table, index * block, block, axis=1)
        return visit(page_ids, first_key + index * (block * page_size), running)

    keys_needed = jnp.max(jnp.max(position, axis=1) + 1 - first_key)
    blocks_needed = jnp.clip((keys_needed - 1) // (block * page_size) + 1, 0, -(-width // block))
    return _finish(jax.lax.fori_loop(jnp.int32(0), blocks_needed, visit_block, running), sinks)


def _with_small_pages(pools: Keys, page_table: Array, largest: int = 256) -> tuple[Keys, Array]:
    """Reshapes large pages, such as a static cache's one page per sequence, to several small ones: a bitcast."""
    pages, page_size = pools.k.shape[:2]
    small = next(size for size in range(min(page_size, largest), 0, -1) if page_size % size == 0)
    parts = page_size // small
    if parts == 1:
        return pools, page_table
    part = jnp.arange(parts, dtype=jnp.int32)[None, None, :]
    page_table = (page_table[:, :, None] * parts + part).reshape(page_table.shape[0], -1)
    return jax.tree.map(
        lambda pool: pool.reshape(pages * parts, small, *pool.shape[2:]), pools
    ), page_table


def _narrow(
    page_table: Array, first_position: Array, queries: int, page_size: int, window: int | None
) -> tuple[Array, Array]:
    """Cuts the page table to the columns that a window can reach; returns it and the position of its first key."""
    tiles, width = page_table.shape
    start = jnp.zeros(tiles, jnp.int32)
    if window is None:
        return page_table, start
    pages = (window + queries + page_size - 3) // page_size + 1
    if pages >= width:
        return page_table, start
    start = jnp.maximum(first_position - (window - 1), 0) // page_size
    column = start[:, None] + jnp.arange(pages, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(page_table, column, axis=1, mode="clip"), start * page_size


def _pages_per_block(q: Array, k_pages: Array, temporary_bytes: int) -> int:
    tiles, queries, heads, head_dim = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    keys_and_values = 2 * kv_heads * head_dim * k_pages.dtype.itemsize
    scores_and_weights = queries * heads * (4 + q.dtype.itemsize)
    return max(1, temporary_bytes // (tiles * page_size * (keys_and_values + scores_and_weights)))


def _gather(pages: Array, page_ids: Array) -> Array:
    gathered = pages.at[page_ids].get(mode="clip", wrap_negative_indices=False)
    return gathered.reshape(page_ids.shape[0], -1, *pages.shape[2:])


def _nothing_yet(grouped: Float[Array, "tiles queries kv_heads group head_dim"]) -> Running:
    tiles, queries, kv_heads, group, head_dim = grouped.shape
    shape = (tiles, kv_heads, queries, group)
    return Running(
        maximum=jnp.full(shape, -jnp.inf, jnp.float32),
        denominator=jnp.zeros(shape, jnp.float32),
        values=jnp.zeros((*shape, head_dim), jnp.float32),
    )


def _add_keys(
    running: Running,
    grouped: Float[Array, "tiles queries kv_heads group head_dim"],
    keys: Keys,
    visible: Bool[Array, "tiles queries keys"],
    options: ScoreOptions,
) -> Running:
    """Adds a block of keys to the online softmax. Keys that no query of a tile sees may be NaN."""
    scale, soft_cap = options.scale, options.soft_cap
    precision = jax.lax.Precision.HIGHEST if grouped.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    product = multiply("bqkgd,btkd->bkqgt", grouped, keys.k.astype(grouped.dtype))
    if keys.k_scales is not None:
        product *= _beside_scores(keys.k_scales)
    scores = (
        product * scale if soft_cap is None else soft_cap * jnp.tanh(product * (scale / soft_cap))
    )
    scores = jnp.where(visible[:, None, :, None, :], scores, -jnp.inf)
    maximum = jnp.maximum(running.maximum, jnp.max(scores, axis=-1))
    # The maximum of a query without keys so far is -inf, and -inf - -inf would be NaN.
    finite = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    weights = jnp.exp(scores - finite[..., None])
    decay = jnp.exp(running.maximum - finite)
    denominator = running.denominator * decay + jnp.sum(weights, axis=-1)
    # 0 * NaN is NaN, so values that no query sees are cleared as well.
    seen = jnp.any(visible, axis=1)[:, :, None]
    v, dtype = keys.v, grouped.dtype
    if keys.v_scales is not None:
        weights *= _beside_scores(jnp.where(seen, keys.v_scales, 0.0))
        # Weights times scales may underflow in float16. bfloat16 represents 8-bit values exactly, too.
        dtype = jnp.bfloat16 if dtype == jnp.float16 else dtype
    v = jnp.where(seen[..., None], v, jnp.zeros((), v.dtype)).astype(dtype)
    values = multiply("bkqgt,btkd->bkqgd", weights.astype(dtype), v)
    return Running(
        maximum=maximum,
        denominator=denominator,
        values=running.values * decay[..., None] + values,
    )


def _beside_scores(
    scales: Float[Array, "tiles keys kv_heads"],
) -> Float[Array, "tiles kv_heads 1 1 keys"]:
    return jnp.swapaxes(scales, 1, 2)[:, :, None, None, :]


def _finish(
    running: Running, sinks: Float[Array, " heads"] | None
) -> tuple[Float[Array, "tiles queries heads head_dim"], Float[Array, "tiles queries heads"]]:
    """Divides by the denominator; a head's sink adds its exponential to the denominator and has no value."""
    tiles, kv_heads, queries, group = running.maximum.shape
    empty = running.denominator == 0
    lse = jnp.where(empty, -jnp.inf, running.maximum + jnp.log(running.denominator))
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, kv_heads, 1, group)
        lse = jnp.where(empty, -jnp.inf, jnp.logaddexp(lse, sink))
    factor = jnp.where(empty, 0.0, jnp.exp(running.maximum - lse))
    out = jnp.transpose(running.values * factor[..., None], (0, 2, 1, 3, 4))
    lse = jnp.transpose(lse, (0, 2, 1, 3))
    return (
        out.reshape(tiles, queries, kv_heads * group, -1),
        lse.reshape(tiles, queries, kv_heads * group),
    )

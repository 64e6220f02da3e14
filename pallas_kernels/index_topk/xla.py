"""`index_topk` in plain XLA: `lax.top_k` (a sort) of each tile's scores."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.index_topk.arguments import IndexArrays
from pallas_kernels.index_topk.scoring import TEMPORARY_BYTES, Scored, visit_tiles
from pallas_kernels.mosaic.ordered_floats import ordered


def index_topk(
    arrays: IndexArrays,
    *,
    topk: int,
    temporary_bytes: int = TEMPORARY_BYTES,
) -> tuple[Int[Array, "tokens topk"], Int[Array, " tokens"]]:
    """Implements `api.index_topk`."""
    num_pages, page_size, _ = arrays.index_pages.shape
    choose = partial(_choose, num_pages=num_pages, page_size=page_size, topk=topk)
    return visit_tiles(choose, arrays, temporary_bytes=temporary_bytes)


def _choose(
    scored: Scored, *, num_pages: int, page_size: int, topk: int
) -> tuple[Int[Array, "queries topk"], Int[Array, " queries"]]:
    """Returns slots and counts of the queries of one tile."""
    keys = scored.scores.shape[1]
    seen = scored.seen[:, None]
    position = jnp.arange(keys, dtype=jnp.int32)[None, :]
    hidden = jnp.iinfo(jnp.int32).min
    order = jnp.where(position < seen, ordered(scored.scores), hidden)
    _, best = lax.top_k(order, min(topk, keys))
    best = jnp.pad(best, ((0, 0), (0, topk - best.shape[1])))
    counts = jnp.minimum(scored.seen, topk)
    chosen = jnp.arange(topk, dtype=jnp.int32)[None, :] < counts[:, None]
    best = jnp.sort(jnp.where(chosen, best, keys), axis=1)
    pages = scored.page_ids.at[best // page_size].get(mode="clip")
    slots = pages * page_size + best % page_size
    return jnp.where(chosen, slots, num_pages * page_size), counts

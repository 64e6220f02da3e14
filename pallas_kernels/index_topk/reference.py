"""Reference of `index_topk`: scores all keys that a query sees, sorts them, and takes the first `topk`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.formats.index_keys import read_index_keys
from pallas_kernels.packed.rows import rows_of_tokens


def index_topk(
    q: Shaped[Array, "tokens index_heads index_dim"],
    weights: Float[Array, "tokens index_heads"],
    index_pages: Shaped[Array, "pages page_size width"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"] | None = None,
    *,
    topk: int,
) -> tuple[Int[Array, "tokens topk"], Int[Array, " tokens"]]:
    """Returns slots and counts; sorts by descending score with NaN as +inf, then by position, in float32."""
    tokens, page_size = q.shape[0], index_pages.shape[1]
    num_slots = index_pages.shape[0] * page_size
    if cu_q_lens is None:
        row, seen = jnp.arange(tokens), seq_lens
    else:
        row, place = rows_of_tokens(cu_q_lens, tokens)
        lengths = cu_q_lens[row + 1] - cu_q_lens[row]
        seen = jnp.where(place >= 0, seq_lens[row] - lengths + place + 1, 0)
    keys = read_index_keys(index_pages)[page_table[row]].reshape(tokens, -1, q.shape[-1])
    products = jnp.einsum("thd,tcd->thc", q.astype(jnp.float32), keys, precision="highest")
    scores = jnp.einsum("th,thc->tc", weights, jnp.maximum(products, 0.0), precision="highest")
    position = jnp.arange(keys.shape[1], dtype=jnp.int32)
    hidden = position[None, :] >= seen[:, None]
    order = jnp.lexsort((jnp.where(jnp.isnan(scores), -jnp.inf, -scores), hidden), axis=1)
    counts = jnp.minimum(seen, topk).astype(jnp.int32)
    best = jnp.pad(order[:, :topk], ((0, 0), (0, max(0, topk - keys.shape[1]))))
    chosen = jnp.arange(topk)[None, :] < counts[:, None]
    best = jnp.sort(jnp.where(chosen, best, keys.shape[1]), axis=1)
    pages = jnp.take_along_axis(page_table[row], best // page_size, axis=1, mode="clip")
    slots = pages * page_size + best % page_size
    return jnp.where(chosen, slots, num_slots).astype(jnp.int32), counts

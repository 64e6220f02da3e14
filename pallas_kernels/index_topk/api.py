"""Public entry point of `index_topk`: the selection of cached tokens in DeepSeek sparse attention."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from pallas_kernels.arguments.checks import INT32_MAX, check_ids, check_shape
from pallas_kernels.dispatch import choose
from pallas_kernels.formats.index_keys import SCALE_BYTES
from pallas_kernels.index_topk import mosaic_gpu, xla
from pallas_kernels.index_topk.arguments import IndexArrays

QUERIES = ("float32", "bfloat16", "float8_e4m3fn")
KEYS = ("uint8", "float32", "bfloat16")


def index_topk(
    q: Shaped[Array | np.ndarray, "tokens index_heads index_dim"],
    weights: Shaped[Array | np.ndarray, "tokens index_heads"],
    index_pages: Shaped[Array | np.ndarray, "pages page_size width"],
    page_table: Shaped[Array | np.ndarray, "rows table_width"],
    seq_lens: Shaped[Array | np.ndarray, " rows"],
    cu_q_lens: Shaped[Array | np.ndarray, " row_bounds"] | None = None,
    *,
    topk: int,
    implementation: str | None = None,
) -> tuple[Int[Array, "tokens topk"], Int[Array, " tokens"]]:
    """Selects the `topk` keys with the largest scores for each query: the lightning indexer of DeepSeek-V3.2 (2025).

    The score of a key k for a query q is the sum over heads of `weight * relu(q . k)`, in float32. Among equal scores
    the lower position is selected. A NaN score counts as +inf, so that a query that sees a corrupted token reads it and
    fails, instead of giving a plausible result without it.

    Args:
        q: index queries after rotary embedding; float32, bfloat16 or float8_e4m3fn. The caller multiplies the scales of
            8-bit queries, which are positive, into `weights`.
        weights: float32 weight of each head, with any constant factor of the scores multiplied in.
        index_pages: pool of indexer keys: uint8 pages of width `index_dim + 4` (`formats/index_keys.py`), or keys in
            float32 or bfloat16. Slots that no query sees may hold any value.
        page_table: int32 page ids of each row in order, padded with any valid id.
        seq_lens: int32 number of keys of each row, those of its queries included; 0 for a padding row.
        cu_q_lens: int32 bounds: row r's queries are `q[cu_q_lens[r]:cu_q_lens[r + 1]]`, at the row's last positions.
            `None` for one query per row.
        topk: most keys per query.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The selected slots, int32 `page * page_size + offset`, in ascending order of position and padded with the pool's
        number of slots; and the number of selected keys, int32: `topk`, or all visible keys if there are fewer.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    _check(q, weights, index_pages, topk)
    tokens = q.shape[0]
    rows = tokens if cu_q_lens is None else None
    check_ids("page_table", page_table, (rows, None))
    check_ids("seq_lens", seq_lens, (page_table.shape[0],))
    if cu_q_lens is not None:
        check_ids("cu_q_lens", cu_q_lens, (page_table.shape[0] + 1,))
    given = (q, weights, index_pages, page_table, seq_lens, cu_q_lens)
    # `None` is an empty pytree, so absent bounds stay `None`.
    arrays = IndexArrays(*jax.tree.map(jnp.asarray, given))
    reasons = {"mosaic_gpu": lambda: mosaic_gpu.why_not(arrays, topk), "xla": lambda: None}
    chosen = choose("index_topk", reasons, implementation)
    if not q.size or not page_table.size:
        slots = jnp.full((tokens, topk), arrays.num_slots, jnp.int32)
        return slots, jnp.zeros(tokens, jnp.int32)
    function = mosaic_gpu.index_topk if chosen == "mosaic_gpu" else xla.index_topk
    return function(arrays, topk=topk)


def _check(
    q: Array | np.ndarray, weights: Array | np.ndarray, index_pages: Array | np.ndarray, topk: int
) -> None:
    check_shape("q", q, (None, None, None))
    check_shape("weights", weights, tuple(q.shape[:2]))
    for name, array, known in (
        ("q", q, QUERIES),
        ("weights", weights, ("float32",)),
        ("index_pages", index_pages, KEYS),
    ):
        if array.dtype.name not in known:
            raise ValueError(f"{name} must be {' or '.join(known)}, got {array.dtype}")
    width = q.shape[2] + SCALE_BYTES * (index_pages.dtype == jnp.uint8)
    check_shape("index_pages", index_pages, (None, None, width))
    if topk < 1:
        raise ValueError(f"topk must be at least 1, got {topk}; DeepSeek-V3.2 uses 2048")
    if index_pages.shape[0] * index_pages.shape[1] > INT32_MAX:
        raise ValueError(
            f"{index_pages.shape[0]} pages of {index_pages.shape[1]} have more slots than an int32 index can address; "
            "use a smaller pool"
        )

"""`index_topk` on Hopper with two Mosaic GPU kernels, for scores and selection.

XLA computes the scores if the first kernel does not support the queries or pages.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Shaped

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel, note_fallback
from pallas_kernels.index_topk import mosaic_scores
from pallas_kernels.index_topk.mosaic_places import CHUNK
from pallas_kernels.index_topk.mosaic_select import select
from pallas_kernels.index_topk.scoring import Scored, rows_and_seen, visit_tiles

MOST_SCORES = 2**30
"""Most scores of one call; they are written to global memory, 4 GiB."""

MOST_CHOSEN = 2**14


def why_not(
    q: ArrayOrStruct, index_pages: ArrayOrStruct, page_table: ArrayOrStruct, topk: int
) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(q, index_pages, page_table, topk)


def refusal(
    q: ArrayOrStruct, index_pages: ArrayOrStruct, page_table: ArrayOrStruct, topk: int
) -> str | None:
    """Returns why the kernel cannot be built for these arrays, or `None` if it can."""
    page_size = index_pages.shape[1]
    if page_size & (page_size - 1):
        return f"page_size must be a power of two, got {page_size}"
    if topk > MOST_CHOSEN:
        return f"topk must be at most {MOST_CHOSEN}, got {topk}"
    scores = q.shape[0] * (-(-page_table.shape[1] * page_size // CHUNK) * CHUNK)
    if scores > MOST_SCORES:
        return f"queries times keys must be at most {MOST_SCORES}, got {scores}"
    return None


def index_topk(
    q: Shaped[Array, "tokens index_heads index_dim"],
    weights: Float[Array, "tokens index_heads"],
    index_pages: Shaped[Array, "pages page_size width"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"] | None = None,
    *,
    topk: int,
    interpret: bool = False,
) -> tuple[Int[Array, "tokens topk"], Int[Array, " tokens"]]:
    """Implements `api.index_topk`. With `interpret` the kernels run in Pallas's interpreter on the CPU, slowly.

    Raises:
        ValueError: the selection kernel does not support the arrays.
    """
    check_kernel(refusal(q, index_pages, page_table, topk))
    num_pages, page_size, _ = index_pages.shape
    arrays = (q, weights, index_pages, page_table, seq_lens, cu_q_lens)
    rows, seen = rows_and_seen(len(q), seq_lens, cu_q_lens)
    slots = select(
        _scores(*arrays, interpret=interpret),
        seen,
        None if cu_q_lens is None else rows,
        page_table,
        topk=topk,
        page_size=page_size,
        num_slots=num_pages * page_size,
        interpret=interpret,
    )
    return slots, jnp.minimum(seen, topk)


def _scores(
    q: Array,
    weights: Array,
    index_pages: Array,
    page_table: Array,
    seq_lens: Array,
    cu_q_lens: Array | None,
    *,
    interpret: bool,
) -> Array:
    """Returns the scores of each query, padded to a multiple of `CHUNK`.

    The kernel computes them, or else XLA, which counts as a fallback.
    """
    arrays = (q, weights, index_pages, page_table, seq_lens, cu_q_lens)
    keys = page_table.shape[1] * index_pages.shape[1]
    padding = -keys % CHUNK
    reason = mosaic_scores.refusal(q, index_pages)
    if reason is None:
        return mosaic_scores.score(*arrays, keys=keys + padding, interpret=interpret)
    note_fallback("index_topk", "mosaic_gpu's scores", reason, "xla's scores")

    def pad(scored: Scored) -> Array:
        return jnp.pad(scored.scores, ((0, 0), (0, padding)))

    return visit_tiles(pad, *arrays)

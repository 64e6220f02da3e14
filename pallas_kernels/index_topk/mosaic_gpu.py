"""`index_topk` on Hopper with two Mosaic GPU kernels, for scores and selection.

XLA computes the scores if the first kernel does not support the queries or pages.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel, note_fallback
from pallas_kernels.index_topk import mosaic_scores
from pallas_kernels.index_topk.arguments import IndexArrays
from pallas_kernels.index_topk.mosaic_places import CHUNK
from pallas_kernels.index_topk.mosaic_select import select
from pallas_kernels.index_topk.scoring import Scored, rows_and_seen, visit_tiles

MOST_SCORES = 2**30
"""Most scores of one call; they are written to global memory, 4 GiB."""

MOST_CHOSEN = 2**14


def why_not(arrays: IndexArrays, topk: int) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can; reads shapes and dtypes only."""
    return why_not_mosaic() or refusal(arrays, topk)


def refusal(arrays: IndexArrays, topk: int) -> str | None:
    """Returns why the kernel cannot be built for these arrays, or `None` if it can."""
    page_size = arrays.index_pages.shape[1]
    if page_size & (page_size - 1):
        return f"page_size must be a power of two, got {page_size}"
    if topk > MOST_CHOSEN:
        return f"topk must be at most {MOST_CHOSEN}, got {topk}"
    scores = arrays.q.shape[0] * (-(-arrays.capacity // CHUNK) * CHUNK)
    if scores > MOST_SCORES:
        return f"queries times keys must be at most {MOST_SCORES}, got {scores}"
    return None


def index_topk(
    arrays: IndexArrays,
    *,
    topk: int,
    interpret: bool = False,
) -> tuple[Int[Array, "tokens topk"], Int[Array, " tokens"]]:
    """Implements `api.index_topk`. With `interpret` the kernels run in Pallas's interpreter on the CPU, slowly.

    Raises:
        ValueError: the selection kernel does not support the arrays.
    """
    check_kernel(refusal(arrays, topk))
    rows, seen = rows_and_seen(len(arrays.q), arrays.seq_lens, arrays.cu_q_lens)
    slots = select(
        _scores(arrays, interpret=interpret),
        seen,
        None if arrays.cu_q_lens is None else rows,
        arrays.page_table,
        topk=topk,
        page_size=arrays.index_pages.shape[1],
        num_slots=arrays.num_slots,
        interpret=interpret,
    )
    return slots, jnp.minimum(seen, topk)


def _scores(arrays: IndexArrays, *, interpret: bool) -> Float[Array, "tokens keys"]:
    """Returns the scores of each query, padded to a multiple of `CHUNK`.

    The kernel computes them, or else XLA, which counts as a fallback.
    """
    padding = -arrays.capacity % CHUNK
    reason = mosaic_scores.refusal(arrays.q, arrays.index_pages)
    if reason is None:
        return mosaic_scores.score(arrays, keys=arrays.capacity + padding, interpret=interpret)
    note_fallback("index_topk", "mosaic_gpu's scores", reason, "xla's scores")

    def pad(scored: Scored) -> Array:
        return jnp.pad(scored.scores, ((0, 0), (0, padding)))

    return visit_tiles(pad, arrays)

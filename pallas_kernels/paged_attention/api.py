"""Public entry point of `paged_attention`: decode attention, one query per row over that row's pages."""

from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.arguments.checks import check_attention, check_ids
from pallas_kernels.dispatch import choose
from pallas_kernels.packed.tile_attention import output_without_keys, why_not
from pallas_kernels.paged_attention import cudnn, mosaic_gpu, xla
from pallas_kernels.paged_attention.mosaic_gpu import DirectLaunch, direct_launch
from pallas_kernels.shared_keys import ROWS_PER_TILE, SharedKeys

__all__ = ["DirectLaunch", "direct_launch", "paged_attention"]


@overload
def paged_attention(
    q: Array | np.ndarray,
    k_pages: Array | np.ndarray,
    v_pages: Array | np.ndarray,
    page_table: Array | np.ndarray,
    seq_lens: Array | np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | np.ndarray | None = None,
    k_scales: Array | np.ndarray | None = None,
    v_scales: Array | np.ndarray | None = None,
    shared: SharedKeys | None = None,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> Array: ...


@overload
def paged_attention(
    q: Array | np.ndarray,
    k_pages: Array | np.ndarray,
    v_pages: Array | np.ndarray,
    page_table: Array | np.ndarray,
    seq_lens: Array | np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | np.ndarray | None = None,
    k_scales: Array | np.ndarray | None = None,
    v_scales: Array | np.ndarray | None = None,
    shared: SharedKeys | None = None,
    return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[Array, Array]: ...


def paged_attention(
    q: Shaped[Array | np.ndarray, "rows heads head_dim"],
    k_pages: Shaped[Array | np.ndarray, "pages page_size kv_heads head_dim"],
    v_pages: Shaped[Array | np.ndarray, "pages page_size kv_heads head_dim"],
    page_table: Shaped[Array | np.ndarray, "rows table_width"],
    seq_lens: Shaped[Array | np.ndarray, " rows"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Shaped[Array | np.ndarray, " heads"] | None = None,
    k_scales: Shaped[Array | np.ndarray, "pages page_size kv_heads"] | None = None,
    v_scales: Shaped[Array | np.ndarray, "pages page_size kv_heads"] | None = None,
    shared: SharedKeys | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> (
    Float[Array, "rows heads head_dim"]
    | tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]
):
    """Computes softmax attention of one query per row, at position `seq_lens - 1`, over the keys in the row's pages.

    Paged attention is vLLM's (Kwon et al., arXiv:2309.06180); grouped queries, windows, soft caps and sinks as in
    Llama, Mistral, Gemma 2 and gpt-oss.

    Args:
        q: queries after rotary embedding.
        k_pages: key pool; query head h reads key head `h // (heads // kv_heads)`. Slots that no row can see may hold
            any value, NaN included.
        v_pages: value pool, addressed like `k_pages`.
        page_table: int32 page ids of each row in order, padded with any valid id.
        seq_lens: int32 number of keys of each row, the query's own included; 0 for a row without a query.
        scale: factor of the scores, usually `head_dim ** -0.5`.
        window: number of most recent keys that a query sees, its own included; `None` for all.
        soft_cap: replaces scores by `soft_cap * tanh(scores / soft_cap)`; `None` for no cap.
        sinks: one logit per head that joins the softmax's denominator and has no value; `None` for none.
        k_scales: float32 factor of each token's and head's keys, for pages of float8_e4m3fn or int8. With scales q
            may have any floating dtype; without, q and the pages share one.
        v_scales: the same for values.
        shared: rows that begin with the same pages. "mosaic_gpu" reads these once for up to eight rows, in a launch
            before its own, if the pages have 16 bits, there is no window, and two rows' queries of a key head fit 64;
            all else reads them for each row. Only rounding depends on it.
        return_lse: whether to also return the natural logarithm of the denominator, sink included.
        implementation: "mosaic_gpu", "xla", or `None` for the first of them that can run. "cudnn" (NVIDIA's cuDNN) runs
            only when named; the last bits of its results vary from run to run.

    Returns:
        The output in q's dtype, zeros for empty rows; with `return_lse`, also the log-sum-exp in float32, `-inf` for
        empty rows.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    options = ScoreOptions(scale, window, soft_cap)
    check_attention(q, k_pages, v_pages, sinks, k_scales, v_scales, options)
    check_ids("page_table", page_table, (q.shape[0], None))
    check_ids("seq_lens", seq_lens, (q.shape[0],))
    if shared is not None:
        check_ids("shared.places", shared.places, (q.shape[0],))
        check_ids("shared.lens", shared.lens, (None,))
        check_ids("shared.rows", shared.rows, (ROWS_PER_TILE * shared.lens.shape[0],))
    given = (q, k_pages, v_pages, page_table, seq_lens, None, sinks, k_scales, v_scales)
    # `None` is an empty pytree, so absent arrays stay `None`.
    arrays = AttentionArrays(*jax.tree.map(jnp.asarray, given))
    reasons = {
        "mosaic_gpu": lambda: mosaic_gpu.why_not(arrays.q, arrays.k_pages),
        "xla": lambda: why_not(q),
        "cudnn": lambda: cudnn.why_not(arrays, options),
    }
    chosen = choose("paged_attention", reasons, implementation, by_name=["cudnn"])
    options = options.within(arrays.capacity)
    if not q.size or not page_table.size:
        out, lse = output_without_keys(arrays.q)
        return (out, lse) if return_lse else out
    if chosen == "mosaic_gpu":
        return mosaic_gpu.paged_attention(arrays, options, shared=shared, return_lse=return_lse)
    if chosen == "cudnn":
        return cudnn.paged_attention(arrays, options, return_lse=return_lse)
    out, lse = xla.paged_attention(arrays, options)
    return (out, lse) if return_lse else out

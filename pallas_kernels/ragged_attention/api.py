"""Public entry point of `ragged_attention`: causal attention of packed queries of several rows over their pages."""

from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.arguments.checks import check_attention, check_ids
from pallas_kernels.dispatch import choose, note_fallback
from pallas_kernels.packed.tile_attention import output_without_keys, why_not
from pallas_kernels.ragged_attention import mosaic_gpu, xla
from pallas_kernels.ragged_attention.mosaic_gpu import DirectLaunch, direct_launch

__all__ = ["DirectLaunch", "direct_launch", "ragged_attention"]


@overload
def ragged_attention(
    q: Array | np.ndarray,
    k_pages: Array | np.ndarray,
    v_pages: Array | np.ndarray,
    page_table: Array | np.ndarray,
    seq_lens: Array | np.ndarray,
    cu_q_lens: Array | np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | np.ndarray | None = None,
    k_scales: Array | np.ndarray | None = None,
    v_scales: Array | np.ndarray | None = None,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> Array: ...


@overload
def ragged_attention(
    q: Array | np.ndarray,
    k_pages: Array | np.ndarray,
    v_pages: Array | np.ndarray,
    page_table: Array | np.ndarray,
    seq_lens: Array | np.ndarray,
    cu_q_lens: Array | np.ndarray,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | np.ndarray | None = None,
    k_scales: Array | np.ndarray | None = None,
    v_scales: Array | np.ndarray | None = None,
    return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[Array, Array]: ...


def ragged_attention(
    q: Shaped[Array | np.ndarray, "tokens heads head_dim"],
    k_pages: Shaped[Array | np.ndarray, "pages page_size kv_heads head_dim"],
    v_pages: Shaped[Array | np.ndarray, "pages page_size kv_heads head_dim"],
    page_table: Shaped[Array | np.ndarray, "rows table_width"],
    seq_lens: Shaped[Array | np.ndarray, " rows"],
    cu_q_lens: Shaped[Array | np.ndarray, " row_bounds"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Shaped[Array | np.ndarray, " heads"] | None = None,
    k_scales: Shaped[Array | np.ndarray, "pages page_size kv_heads"] | None = None,
    v_scales: Shaped[Array | np.ndarray, "pages page_size kv_heads"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> (
    Float[Array, "tokens heads head_dim"]
    | tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]
):
    """Computes causal attention of packed queries: any mix of prefill, chunks after a cached prefix, and decode rows.

    The interface follows vLLM's and FlashInfer's ragged attention over paged keys and values.

    Args:
        q: queries of all rows, one row after the other, after rotary embedding.
        k_pages: key pool, which must already hold the queries' own keys; query head h reads key head
            `h // (heads // kv_heads)`. Slots that no row can see may hold any value, NaN included.
        v_pages: value pool, addressed like `k_pages`.
        page_table: int32 page ids of each row in order, padded with any valid id.
        seq_lens: int32 number of keys of each row, those of its queries included; 0 for a padding row.
        cu_q_lens: int32 bounds: row r's queries are `q[cu_q_lens[r]:cu_q_lens[r + 1]]`, at the row's last positions.
        scale: factor of the scores, usually `head_dim ** -0.5`.
        window: number of most recent keys that a query sees, its own included; `None` for all.
        soft_cap: replaces scores by `soft_cap * tanh(scores / soft_cap)`; `None` for no cap.
        sinks: one logit per head that joins the softmax's denominator and has no value; `None` for none.
        k_scales: float32 factor of each token's and head's keys, for pages of float8_e4m3fn or int8. With scales q
            may have any floating dtype; without, q and the pages share one.
        v_scales: the same for values.
        return_lse: whether to also return the natural logarithm of the denominator, sink included.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run. Under "mosaic_gpu" a call with 8-bit
            pages still runs in XLA, and counts as a fallback, if the bfloat16 copies of the pages in its page table
            would take more than 2 GiB.

    Returns:
        The output in q's dtype, zeros for the padding tokens from `cu_q_lens[rows]` on; with `return_lse`, also the
        log-sum-exp in float32, `-inf` for padding tokens.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    options = ScoreOptions(scale, window, soft_cap)
    check_attention(q, k_pages, v_pages, sinks, k_scales, v_scales, options)
    check_ids("page_table", page_table, (None, None))
    check_ids("seq_lens", seq_lens, (page_table.shape[0],))
    check_ids("cu_q_lens", cu_q_lens, (page_table.shape[0] + 1,))
    given = (q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, sinks, k_scales, v_scales)
    # `None` is an empty pytree, so absent arrays stay `None`.
    arrays = AttentionArrays(*jax.tree.map(jnp.asarray, given))
    reasons = {
        "mosaic_gpu": lambda: mosaic_gpu.why_not(arrays.q, arrays.k_pages),
        "xla": lambda: why_not(q),
    }
    chosen = choose("ragged_attention", reasons, implementation)
    options = options.within(arrays.capacity)
    if not q.size or not page_table.size:
        out, lse = output_without_keys(arrays.q)
        return (out, lse) if return_lse else out
    if chosen == "mosaic_gpu":
        large = mosaic_gpu.why_fall_back(arrays.k_pages, arrays.page_table)
        if large is None:
            return mosaic_gpu.ragged_attention(arrays, options, return_lse=return_lse)
        note_fallback("ragged_attention", chosen, large, "xla")
    out, lse = xla.ragged_attention(arrays, options)
    return (out, lse) if return_lse else out

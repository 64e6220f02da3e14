"""The door to `ragged_attention`: packed queries of several rows over those rows' pages."""

from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_attention, check_ids
from pallas_kernels.dispatch import choose, note_fallback
from pallas_kernels.packed.tile_attention import nothing, why_not
from pallas_kernels.ragged_attention import mosaic_gpu, xla


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
    """Attends causally from packed queries: prefill, chunks after a cached prefix and decode, mixed as it comes.

    Args:
        q: queries of all rows, one row after the other, after rotary embedding.
        k_pages: key pool, which holds the keys of the queries too; query head h reads key head
            `h // (heads // kv_heads)`. Places that no row can see may hold anything, NaN included.
        v_pages: value pool, addressed like `k_pages`.
        page_table: int32 page ids of each row in order, padded with any valid id.
        seq_lens: int32 keys of each row, those of its queries included; 0 for a padding row.
        cu_q_lens: int32; row r's queries are `q[cu_q_lens[r]:cu_q_lens[r + 1]]`, the row's last positions.
        scale: factor on the scores, usually `head_dim ** -0.5`.
        window: number of keys that a query sees, counted back from itself; `None` for all.
        soft_cap: bound of the scores by `soft_cap * tanh(scores / soft_cap)`; `None` for none.
        sinks: one logit per head that joins the softmax's denominator and brings no value.
        k_scales: for pages of float8_e4m3fn or int8, what each token's and head's keys are multiplied by; then q
            may be of any floating dtype, which it otherwise shares with the pages.
        v_scales: the same for values.
        return_lse: also return the natural log of the denominator, sink included.
        implementation: "mosaic_gpu", "xla", or `None` for the best that can run. "mosaic_gpu" hands a call on to XLA,
            and counts it among the fallbacks, where unpacking pages of 8 bits for the whole page table would take
            more than 2 GiB.

    Returns:
        The output in q's dtype, zeros for tokens from `cu_q_lens[rows]` on; with `return_lse`, also the
        log-sum-exp in float32, `-inf` for those tokens.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        Unsupported: the implementation asked for, or every one, cannot run; the message carries each reason.
    """
    options = {"window": window, "soft_cap": soft_cap}
    check_attention(q, k_pages, v_pages, sinks, k_scales, v_scales, scale=scale, **options)
    check_ids("page_table", page_table, (None, None))
    check_ids("seq_lens", seq_lens, (page_table.shape[0],))
    check_ids("cu_q_lens", cu_q_lens, (page_table.shape[0] + 1,))
    arrays = tuple(map(jnp.asarray, (q, k_pages, v_pages, page_table, seq_lens, cu_q_lens)))
    # To JAX `None` is a tree without leaves.
    optional = {"sinks": sinks, "k_scales": k_scales, "v_scales": v_scales}
    options |= jax.tree.map(jnp.asarray, optional)
    reasons = {
        "mosaic_gpu": lambda: mosaic_gpu.why_not(*arrays, **options),
        "xla": lambda: why_not(q),
    }
    chosen = choose("ragged_attention", reasons, implementation)
    # A window of all that a row can hold hides nothing, and what is counted with a larger one could pass 32 bits.
    if window is not None and window >= page_table.shape[1] * k_pages.shape[1]:
        options["window"] = None
    if not q.size or not page_table.size:
        out, lse = nothing(arrays[0])
        return (out, lse) if return_lse else out
    if chosen == "mosaic_gpu":
        large = mosaic_gpu.why_hand_on(arrays[1], arrays[3])
        if large is None:
            return mosaic_gpu.ragged_attention(
                *arrays, scale=scale, return_lse=return_lse, **options
            )
        note_fallback("ragged_attention", chosen, large, "xla")
    out, lse = xla.ragged_attention(*arrays, scale=scale, **options)
    return (out, lse) if return_lse else out

"""Public entry point of `latent_attention`: multi-head latent attention (MLA), absorbed form, over paged latents."""

from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_ids, check_scale, check_shape
from pallas_kernels.arguments.latent import LatentArrays, LatentOptions
from pallas_kernels.dispatch import choose
from pallas_kernels.latent_attention import mosaic_gpu, xla
from pallas_kernels.packed.tile_attention import output_without_keys, why_not


@overload
def latent_attention(
    q: Array | np.ndarray,
    latent_pages: Array | np.ndarray,
    page_table: Array | np.ndarray,
    seq_lens: Array | np.ndarray,
    cu_q_lens: Array | np.ndarray | None = None,
    *,
    value_dim: int,
    scale: float,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> Array: ...


@overload
def latent_attention(
    q: Array | np.ndarray,
    latent_pages: Array | np.ndarray,
    page_table: Array | np.ndarray,
    seq_lens: Array | np.ndarray,
    cu_q_lens: Array | np.ndarray | None = None,
    *,
    value_dim: int,
    scale: float,
    return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[Array, Array]: ...


def latent_attention(
    q: Shaped[Array | np.ndarray, "tokens heads latent_and_rope"],
    latent_pages: Shaped[Array | np.ndarray, "pages page_size _ latent_and_rope"],
    page_table: Shaped[Array | np.ndarray, "rows table_width"],
    seq_lens: Shaped[Array | np.ndarray, " rows"],
    cu_q_lens: Shaped[Array | np.ndarray, " row_bounds"] | None = None,
    *,
    value_dim: int,
    scale: float,
    return_lse: bool = False,
    implementation: str | None = None,
) -> (
    Float[Array, "tokens heads value_dim"]
    | tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]
):
    """Computes causal attention of all heads of each query over one latent per token, which is both key and value.

    This is DeepSeek-V2's multi-head latent attention (arXiv:2405.04434) with the up-projections absorbed into the
    queries and the output projection. A key is a whole latent: the compressed part, then the rotary part. Its value is
    the latent's first `value_dim` components.

    Args:
        q: absorbed queries, their rotary parts last; one per row, or packed with bounds `cu_q_lens`.
        latent_pages: pool of latents, which must already hold the queries' own. Slots that no row can see may hold any
            value, NaN included.
        page_table: int32 page ids of each row in order, padded with any valid id.
        seq_lens: int32 number of latents of each row, those of its queries included; 0 for an empty row.
        cu_q_lens: int32 bounds: row r's queries are `q[cu_q_lens[r]:cu_q_lens[r + 1]]`, at the row's last positions.
            `None` for one query per row, at position `seq_lens - 1`.
        value_dim: components of a latent that are its value, usually 512 of 576.
        scale: factor of the scores, from the head dimension before absorption; usually `192 ** -0.5`.
        return_lse: whether to also return the natural logarithm of the softmax's denominator.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The output in q's dtype, zeros for empty rows and for padding tokens from `cu_q_lens[rows]` on; with
        `return_lse`, also the log-sum-exp in float32, `-inf` for those.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    options = LatentOptions(value_dim, scale)
    _check(q, latent_pages, options)
    check_ids("page_table", page_table, (None if cu_q_lens is not None else q.shape[0], None))
    rows = page_table.shape[0]
    check_ids("seq_lens", seq_lens, (rows,))
    if cu_q_lens is not None:
        check_ids("cu_q_lens", cu_q_lens, (rows + 1,))
    given = (q, latent_pages, page_table, seq_lens, cu_q_lens)
    # `None` is an empty pytree, so absent bounds stay `None`.
    arrays = LatentArrays(*jax.tree.map(jnp.asarray, given))
    reasons = {
        "mosaic_gpu": lambda: mosaic_gpu.why_not(arrays, options),
        "xla": lambda: why_not(q),
    }
    chosen = choose("latent_attention", reasons, implementation)
    if not q.size or not page_table.size:
        out, lse = output_without_keys(arrays.q[..., :value_dim])
        return (out, lse) if return_lse else out
    if chosen == "mosaic_gpu":
        return mosaic_gpu.latent_attention(arrays, options, return_lse=return_lse)
    out, lse = xla.latent_attention(arrays, options)
    return (out, lse) if return_lse else out


def _check(q: Array | np.ndarray, latent_pages: Array | np.ndarray, options: LatentOptions) -> None:
    """Raises `ValueError` for queries, pool and options that do not fit each other."""
    check_shape("q", q, (None, None, None))
    check_shape("latent_pages", latent_pages, (None, None, 1, q.shape[2]))
    if q.dtype != latent_pages.dtype:
        raise ValueError(
            f"q and latent_pages must share one dtype, got {q.dtype} and {latent_pages.dtype}; "
            f"cast q to the cache's dtype"
        )
    if not 1 <= options.value_dim <= q.shape[2]:
        raise ValueError(
            f"value_dim must be at least 1 and at most the {q.shape[2]} components of a latent, "
            f"got {options.value_dim}"
        )
    check_scale(options.scale)

"""Public entry point of `sparse_attention`: latent attention (MLA) over the tokens that an indexer has selected."""

from typing import Literal, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_ids, check_scale, check_shape
from pallas_kernels.arguments.latent import LatentOptions, SparseArrays
from pallas_kernels.dispatch import choose
from pallas_kernels.formats.latent_records import GROUP, record_bytes
from pallas_kernels.packed.tile_attention import why_not
from pallas_kernels.sparse_attention import mosaic_gpu, xla


@overload
def sparse_attention(
    q: Array | np.ndarray,
    records: Array | np.ndarray,
    slots: Array | np.ndarray,
    counts: Array | np.ndarray,
    *,
    value_dim: int,
    scale: float,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> Array: ...


@overload
def sparse_attention(
    q: Array | np.ndarray,
    records: Array | np.ndarray,
    slots: Array | np.ndarray,
    counts: Array | np.ndarray,
    *,
    value_dim: int,
    scale: float,
    return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[Array, Array]: ...


def sparse_attention(
    q: Shaped[Array | np.ndarray, "tokens heads latent_and_rope"],
    records: Shaped[Array | np.ndarray, "pages page_size 1 width"],
    slots: Shaped[Array | np.ndarray, "tokens topk"],
    counts: Shaped[Array | np.ndarray, " tokens"],
    *,
    value_dim: int,
    scale: float,
    return_lse: bool = False,
    implementation: str | None = None,
) -> (
    Float[Array, "tokens heads value_dim"]
    | tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]
):
    """Computes attention of all heads of each token over the records at its slots.

    This is the attention of DeepSeek-V3.2's sparse attention (2025). There is no causal mask: the slots alone decide
    which tokens a query sees. With all visible tokens selected the result is that of `latent_attention`.

    Args:
        q: absorbed queries, the latent part and then the rotary part; float32, bfloat16 or float16.
        records: pool of records of rank `value_dim`: uint8 records (`formats/latent_records.py`), which are rounded to
            q's dtype when decoded; or latents followed by rotary keys in q's dtype.
        slots: int32 `page * page_size + offset` of the selected tokens, as `index_topk` returns them.
        counts: int32; token t attends to `slots[t, :counts[t]]`. Later slots are not read.
        value_dim: components of a record that are its value: the latent, which comes first.
        scale: factor of the scores.
        return_lse: whether to also return the natural logarithm of the denominator.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The output in q's dtype, zeros for tokens with count 0; with `return_lse`, also the log-sum-exp in float32,
        `-inf` for those tokens.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    options = LatentOptions(value_dim, scale)
    _check(q, records, options)
    check_ids("slots", slots, (q.shape[0], None))
    check_ids("counts", counts, (q.shape[0],))
    arrays = SparseArrays(*map(jnp.asarray, (q, records, slots, counts)))
    reasons = {
        "mosaic_gpu": lambda: mosaic_gpu.why_not(arrays, options),
        "xla": lambda: why_not(q),
    }
    chosen = choose("sparse_attention", reasons, implementation)
    if not q.size or not slots.size:
        out = jnp.zeros((*q.shape[:2], value_dim), q.dtype)
        lse = jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    elif chosen == "mosaic_gpu":
        return mosaic_gpu.sparse_attention(arrays, options, return_lse=return_lse)
    else:
        out, lse = xla.sparse_attention(arrays, options)
    return (out, lse) if return_lse else out


def _check(q: Array | np.ndarray, records: Array | np.ndarray, options: LatentOptions) -> None:
    """Raises `ValueError` for queries, records and options that do not fit each other."""
    check_shape("q", q, (None, None, None))
    value_dim, width = options.value_dim, q.shape[2]
    if not 0 < value_dim <= width:
        raise ValueError(f"value_dim must be 1 to {width}, the size of a query, got {value_dim}")
    check_scale(options.scale)
    if records.dtype == jnp.uint8:
        if value_dim % GROUP:
            raise ValueError(
                f"value_dim of uint8 records must be a multiple of {GROUP}, got {value_dim}"
            )
        width = record_bytes(value_dim, width - value_dim)
    elif records.dtype != q.dtype:
        raise ValueError(f"records must be uint8 or have q's dtype {q.dtype}, got {records.dtype}")
    check_shape("records", records, (None, None, 1, width))

"""Grouped-query attention over pages: fused projection, rotation, write to the cache, attend, project back."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.batch import PagedTables, StepBatch
from jaxkv.layers.linear import linear
from jaxkv.layers.norm import rms_norm
from jaxkv.layers.rope import Angles, rotate
from pallas_kernels import page_write, paged_attention, ragged_attention


def attention(
    params: Mapping[str, Array],
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    batch: StepBatch,
    tables: PagedTables,
    angles: Angles,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norm_eps: float = 1e-6,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Float[Array, "tokens hidden_size"]]:
    """Remembers the new tokens' keys and values and lets each token attend to what it may see.

    Args:
        params: "qkv" [(heads + 2 * kv_heads) * head_dim, hidden_size], queries first, then keys, then values;
            "o" [hidden_size, heads * head_dim]; where the model has them "qkv_bias", "o_bias" and "qk_norm"
            [2, head_dim], the weights of the norms on queries and keys.
        layer_cache: the layer's pages, "key" and "value".
        x: normalised hidden states.
        batch: the step's metadata.
        tables: where the layer's group reads and writes.
        angles: from `rope_angles`.
        heads: query heads.
        kv_heads: heads of keys and values; each serves `heads / kv_heads` query heads.
        head_dim: components of a head.
        norm_eps: of the norms on queries and keys.
        window: tokens each token sees, itself included; `None` for all.
        implementation: which implementation of the ops to insist on; `None` takes the best.

    Returns:
        The layer's pages after the write, and the attention's output.
    """
    qkv = linear(params["qkv"], x, params.get("qkv_bias"))
    qkv = qkv.reshape(x.shape[0], heads + 2 * kv_heads, head_dim)
    q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
    if "qk_norm" in params:
        q = rms_norm(params["qk_norm"][0], q, eps=norm_eps)
        k = rms_norm(params["qk_norm"][1], k, eps=norm_eps)
    layer_cache, mixed = attend(
        layer_cache,
        rotate(angles, q),
        rotate(angles, k),
        v,
        batch,
        tables,
        scale=head_dim**-0.5,
        window=window,
        implementation=implementation,
    )
    return layer_cache, linear(params["o"], mixed.reshape(x.shape[0], -1), params.get("o_bias"))


def attend(
    layer_cache: Mapping[str, Array],
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    batch: StepBatch,
    tables: PagedTables,
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Float[Array, "tokens heads head_dim"]]:
    """Writes keys and values into the layer's pages, then attends over the pages.

    The write comes first, so that a token sees itself and its neighbours of the same step through the pages.
    """
    pages = (layer_cache["key"], layer_cache["value"])
    keys, values = page_write(pages, (k, v), tables.write_slots, implementation=implementation)
    # The ops take queries in the pages' dtype, which may be narrower than the parameters'.
    queries = q.astype(keys.dtype)
    if batch.decode:
        mixed = paged_attention(
            queries,
            keys,
            values,
            tables.page_table,
            batch.seq_lens,
            scale=scale,
            window=window,
            implementation=implementation,
        )
    else:
        mixed = ragged_attention(
            queries,
            keys,
            values,
            tables.page_table,
            batch.seq_lens,
            batch.cu_q_lens,
            scale=scale,
            window=window,
            implementation=implementation,
        )
    return {"key": keys, "value": values}, mixed.astype(q.dtype)

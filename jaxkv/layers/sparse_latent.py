"""Sparse attention over latents (DeepSeek-AI, DeepSeek-V3.2): an indexer selects the tokens that each query reads.

The reference multiplies index queries and keys by a Hadamard matrix before it rounds them to 8 bits. This changes only
the rounding errors of their products, and is left out here as in Transformers.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxkv.batch import PagedTables, StepBatch
from jaxkv.config.blocks import IndexConfig, LatentConfig
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.latent import absorb, attend_expanded, project_latent, raise_values
from jaxkv.layers.linear import linear, project
from jaxkv.layers.norm import layer_norm
from jaxkv.layers.rope import Angles, rotate, rotate_pairs
from pallas_kernels import index_topk, page_write, sparse_attention
from pallas_kernels.families import member
from pallas_kernels.formats.index_keys import quantise_keys, write_index_keys
from pallas_kernels.formats.latent_records import decode_records, encode_records

_NORM_EPS = 1e-6


def sparse_latent_mixer(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    batch: StepBatch,
    tables: PagedTables,
    angles: Angles,
    *,
    heads: int,
    latent: LatentConfig,
    index: IndexConfig,
    scale: float,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Float[Array, "tokens hidden_size"]]:
    """Writes the new tokens' latents and index keys to the pages, and lets each token attend to its top-k tokens.

    Args:
        params: those of `latent_mixer`, and the indexer's: "index_q" [index.heads * index.head_dim, q_lora_rank],
            "index_k" [index.head_dim, hidden_size], "index_norm" and "index_norm_bias" [index.head_dim],
            "index_weights" [index.heads, hidden_size], float32.
        layer_cache: the layer's pages, "key" and "indexer": quantised records, or plain arrays (see `variants.dsa`).
            With quantised index keys, index queries are rounded to 8 bits as well.
        x: normalised hidden states.
        batch: the step's metadata. A `fresh` prefill step of at most `topk` tokens selects all tokens, so it uses the
            expanded form of `latent_mixer` without the indexer.
        tables: page table and write slots of the layer's group.
        angles: from `rope_angles`.
        heads: query heads.
        latent: sizes of the attention.
        index: sizes of the indexer.
        scale: factor of attention scores.
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The layer's pages after the write, and the attention's output.
    """
    q, key, query_latent = project_latent(
        params, x, angles, heads=heads, latent=latent, implementation=implementation
    )
    stored, rounded = _as_stored(key, layer_cache["key"], latent)
    (pages,) = page_write(
        (layer_cache["key"],),
        (stored[:, None, :],),
        tables.write_slots,
        implementation=member(implementation, "page_write"),
    )
    turn = _rotate_first_pairs if index.pairs else rotate
    index_key = _index_key(params, x, angles, turn)
    index_pages = write_index_keys(layer_cache["indexer"], index_key, tables.write_slots)
    if batch.fresh and not batch.decode and x.shape[0] <= index.topk:
        mixed = attend_expanded(
            params, q, rounded, batch, latent=latent, scale=scale, implementation=implementation
        )
    else:
        index_q = project(params["index_q"], query_latent).reshape(x.shape[0], index.heads, -1)
        compared, weights = _as_compared(
            turn(angles, index_q), _head_weights(params, x, index), index_pages
        )
        slots, counts = index_topk(
            compared,
            weights,
            index_pages,
            tables.page_table,
            batch.seq_lens,
            None if batch.decode else batch.cu_q_lens,
            topk=index.topk,
            implementation=member(implementation, "index_topk"),
        )
        queries = absorb(params, q, latent)
        mixed = sparse_attention(
            queries if pages.dtype == jnp.uint8 else queries.astype(pages.dtype),
            pages,
            slots,
            counts,
            value_dim=latent.kv_lora_rank,
            scale=scale,
            implementation=member(implementation, "sparse_attention"),
        )
        mixed = raise_values(params, mixed.astype(q.dtype))
    out = linear(params["o"], mixed.reshape(x.shape[0], -1), implementation=implementation)
    return {"key": pages, "indexer": index_pages}, out


def _rotate_first_pairs(
    angles: Angles, x: Float[Array, "tokens heads head_dim"]
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates the first components as `rotate_pairs` does, and leaves the others as they are."""
    first, others = jnp.split(x, (2 * angles[0].shape[-1],), axis=-1)
    return jnp.concatenate((rotate_pairs(angles, first), others), axis=-1)


def _index_key(
    params: LayerParams,
    x: Float[Array, "tokens hidden_size"],
    angles: Angles,
    turn: Callable[[Angles, Array], Array],
) -> Float[Array, "tokens head_dim"]:
    """Returns the key of each token that the indexer compares, normalised and rotated."""
    key = project(params["index_k"], x)
    key = layer_norm(params["index_norm"], params["index_norm_bias"], key, eps=_NORM_EPS)
    return turn(angles, key[:, None, :])[:, 0]


def _as_stored(
    key: Float[Array, "tokens stored"],
    pages: Shaped[Array, "pages page_size 1 width"],
    latent: LatentConfig,
) -> tuple[Shaped[Array, "tokens width"], Float[Array, "tokens stored"]]:
    """Returns what is written to the pages, and the key as it will be read from them."""
    if pages.dtype != jnp.uint8:
        return key, key.astype(pages.dtype).astype(key.dtype)
    compressed, rope = jnp.split(key, (latent.kv_lora_rank,), axis=1)
    records = encode_records(compressed, rope)
    return records, decode_records(records, rank=latent.kv_lora_rank).astype(key.dtype)


def _as_compared(
    queries: Float[Array, "tokens index_heads index_dim"],
    weights: Float[Array, "tokens index_heads"],
    index_pages: Shaped[Array, "pages page_size width"],
) -> tuple[Shaped[Array, "tokens index_heads index_dim"], Float[Array, "tokens index_heads"]]:
    """Returns index queries and the weights of their scores, in the format of the stored keys.

    For quantised keys, queries are quantised too, as in the reference, so that tensor cores multiply them directly.
    The queries' scales are positive and are moved into the weights.
    """
    if index_pages.dtype != jnp.uint8:
        return queries, weights
    numbers, scales = quantise_keys(queries)
    return numbers, weights * scales


def _head_weights(
    params: LayerParams, x: Float[Array, "tokens hidden_size"], index: IndexConfig
) -> Float[Array, "tokens index_heads"]:
    """Returns the float32 weight of each index head's scores, with the constant factors included."""
    weights = project(params["index_weights"], x.astype(jnp.float32), result=jnp.float32)
    return weights * (index.heads * index.head_dim) ** -0.5

"""Multi-head latent attention over pages of latents (DeepSeek-AI, DeepSeek-V2): project, rotate, write, attend.

The cache stores one latent and one rotary key per token, for all heads. There are two ways to attend, equal up to
rounding. "Absorbed" projects queries into the space of the latents and attends over the pages; it reads least, and is
used with cached tokens. "Expanded" makes keys and values from the latents first; its products are four to five times
smaller, and it is used for prefill steps whose rows have no cached tokens.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.batch import PagedTables, StepBatch
from jaxkv.config.blocks import LatentConfig, QueryGrowth
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.linear import linear, project
from jaxkv.layers.norm import rms_norm
from jaxkv.layers.rope import Angles, grow, rotate, rotate_pairs
from pallas_kernels import latent_attention, page_write, ragged_attention
from pallas_kernels.families import member
from pallas_kernels.fixed_order import by_row_tiles

# The epsilon of the latents' norms in all published models; it does not follow the config's `norm_eps`.
_NORM_EPS = 1e-6
_LARGEST_PAGE, _SMALLEST_PAGE = 64, 8


def latent_mixer(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    batch: StepBatch,
    tables: PagedTables,
    angles: Angles,
    *,
    heads: int,
    latent: LatentConfig,
    scale: float,
    growth: QueryGrowth | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Float[Array, "tokens hidden_size"]]:
    """Writes the new tokens' latents to the pages, and attends causally.

    Args:
        params: "qkv_down" [queries + stored, hidden_size], where `queries` is `q_lora_rank`, or heads * query_dim
            without a latent of queries; with it also "q_norm" [q_lora_rank] and "q_up"
            [heads * query_dim, q_lora_rank]; "kv_norm" [kv_lora_rank], "k_up" [heads, nope_dim, kv_lora_rank],
            "v_up" [heads, value_dim, kv_lora_rank]; "o" [hidden_size, heads * value_dim].
        layer_cache: the layer's pages, "key" [pages, page_size, 1, stored].
        x: normalised hidden states.
        batch: the step's metadata; the expanded form is used if it is `fresh` and no decode step.
        tables: page table and write slots of the layer's group.
        angles: from `rope_angles`.
        heads: query heads.
        latent: sizes.
        scale: factor of attention scores.
        growth: factor of queries that grows with their position; `None` for none.
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The layer's pages after the write, and the attention's output.
    """
    q, key, _ = project_latent(
        params, x, angles, heads=heads, latent=latent, implementation=implementation
    )
    if growth is not None:
        q = grow(q, batch.positions, growth)
    (pages,) = page_write(
        (layer_cache["key"],),
        (key[:, None, :],),
        tables.write_slots,
        implementation=member(implementation, "page_write"),
    )
    options = {"latent": latent, "scale": scale, "implementation": implementation}
    if batch.fresh and not batch.decode:
        # Rounded to the pages' dtype, so that later steps, which read the pages, see the same values.
        key = key.astype(pages.dtype).astype(key.dtype)
        mixed = attend_expanded(params, q, key, batch, **options)
    else:
        mixed = attend_absorbed(params, q, pages, batch, tables, **options)
    out = linear(params["o"], mixed.reshape(x.shape[0], -1), implementation=implementation)
    return {"key": pages}, out


def project_latent(
    params: LayerParams,
    x: Float[Array, "tokens hidden_size"],
    angles: Angles,
    *,
    heads: int,
    latent: LatentConfig,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "tokens heads query_dim"],
    Float[Array, "tokens stored"],
    Float[Array, "tokens query_latent"],
]:
    """Returns rotated queries (nope part first), the stored vector (latent, rotated key), and the latents of queries.

    Without a latent of queries, the last is the queries before the rotation.
    """
    run = partial(linear, implementation=implementation)
    down = run(params["qkv_down"], x)
    query_latent, compressed, rope_key = jnp.split(
        down, (down.shape[1] - latent.stored, down.shape[1] - latent.rope_dim), axis=1
    )
    if latent.has_query_latent:
        query_latent = rms_norm(params["q_norm"], query_latent, eps=_NORM_EPS)
    queries = run(params["q_up"], query_latent) if latent.has_query_latent else query_latent
    rotate_rope = rotate_pairs if latent.pairs else rotate
    nope, rope = jnp.split(queries.reshape(x.shape[0], heads, -1), (latent.nope_dim,), axis=2)
    q = jnp.concatenate((nope, rotate_rope(angles, rope)), axis=2)
    compressed = rms_norm(params["kv_norm"], compressed, eps=_NORM_EPS)
    rope_key = rotate_rope(angles, rope_key[:, None, :])[:, 0]
    return q, jnp.concatenate((compressed, rope_key), axis=1), query_latent


def absorb(
    params: LayerParams,
    q: Float[Array, "tokens heads query_dim"],
    latent: LatentConfig,
) -> Float[Array, "tokens heads stored"]:
    """Projects queries into the space of the latents: the product with a latent equals that with its expanded key."""
    nope, rope = jnp.split(q, (latent.nope_dim,), axis=2)
    return jnp.concatenate((_per_head(nope, params["k_up"], contract=1), rope), axis=2)


def raise_values(
    params: LayerParams, mixed: Float[Array, "tokens heads kv_lora_rank"]
) -> Float[Array, "tokens heads value_dim"]:
    """Expands mixed latents to values."""
    return _per_head(mixed, params["v_up"], contract=2)


def attend_absorbed(
    params: LayerParams,
    q: Float[Array, "tokens heads query_dim"],
    pages: Float[Array, "pages page_size 1 stored"],
    batch: StepBatch,
    tables: PagedTables,
    *,
    latent: LatentConfig,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "tokens heads value_dim"]:
    """Attends over the pages, to which the new tokens were written before."""
    mixed = latent_attention(
        absorb(params, q, latent).astype(pages.dtype),
        pages,
        tables.page_table,
        batch.seq_lens,
        None if batch.decode else batch.cu_q_lens,
        value_dim=latent.kv_lora_rank,
        scale=scale,
        implementation=member(implementation, "latent_attention"),
    )
    return raise_values(params, mixed.astype(q.dtype))


def attend_expanded(
    params: LayerParams,
    q: Float[Array, "tokens heads query_dim"],
    key: Float[Array, "tokens stored"],
    batch: StepBatch,
    *,
    latent: LatentConfig,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "tokens heads value_dim"]:
    """Attends among the new tokens of each row; rows must have no cached tokens.

    It runs `ragged_attention` over temporary pages: latents are gathered so that each row begins at a page, and then
    expanded to keys and values. The narrower one of keys and values is padded with zeros.
    """
    tokens, heads, _ = q.shape
    token, table = own_pages(batch.cu_q_lens, tokens)
    compressed, rope = jnp.split(
        key.at[token.reshape(-1)].get(mode="clip"), (latent.kv_lora_rank,), axis=1
    )
    k, v = (
        project(params[name].reshape(-1, latent.kv_lora_rank), compressed).reshape(
            token.size, heads, -1
        )
        for name in ("k_up", "v_up")
    )
    rope = jnp.broadcast_to(rope[:, None, :], (token.size, heads, latent.rope_dim))
    k = jnp.concatenate((k, rope), axis=2)
    width = max(latent.query_dim, latent.value_dim)
    mixed = ragged_attention(
        _widened(q, width),
        _widened(k, width).reshape(*token.shape, heads, width),
        _widened(v, width).reshape(*token.shape, heads, width),
        table,
        batch.cu_q_lens[1:] - batch.cu_q_lens[:-1],
        batch.cu_q_lens,
        scale=scale,
        implementation=member(implementation, "ragged_attention"),
    )
    return mixed[:, :, : latent.value_dim]


def own_pages(
    cu_q_lens: Int[Array, " row_bounds"], tokens: int
) -> tuple[Int[Array, "pages page_size"], Int[Array, "rows table_width"]]:
    """Assigns packed rows to temporary pages; each row begins at a page.

    Args:
        cu_q_lens: row r's tokens are `cu_q_lens[r]:cu_q_lens[r + 1]`.
        tokens: number of tokens, padding included.

    Returns:
        The token in each slot of each page (arbitrary after a row's end), and each row's page table (arbitrary after
        its last page).
    """
    rows = cu_q_lens.shape[0] - 1
    page_size = _page_size(tokens, rows)
    pages = max(1, (tokens + rows * (page_size - 1)) // page_size)
    pages_of_row = (cu_q_lens[1:] - cu_q_lens[:-1] + (page_size - 1)) // page_size
    first = jnp.pad(jnp.cumsum(pages_of_row, dtype=jnp.int32), (1, 0))
    page = jnp.arange(pages, dtype=jnp.int32)
    owner = jnp.sum(first[None, 1:] <= page[:, None], axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, rows - 1)
    begin = cu_q_lens[owner] + (page - first[owner]) * page_size
    token = begin[:, None] + jnp.arange(page_size, dtype=jnp.int32)[None, :]
    column = jnp.arange(-(-tokens // page_size), dtype=jnp.int32)
    return token, jnp.minimum(first[:-1, None] + column[None, :], pages - 1)


def _page_size(tokens: int, rows: int) -> int:
    """Returns the largest page size with which the unused slots are at most half as many as the tokens."""
    size = _LARGEST_PAGE
    while size > _SMALLEST_PAGE and 2 * rows * size > tokens:
        size //= 2
    return size


def _per_head(
    x: Float[Array, "tokens heads width"], weight: Float[Array, "heads out in"], *, contract: int
) -> Float[Array, "tokens heads result"]:
    """Multiplies each head by its own matrix, contracting the matrix's axis `contract`."""

    def multiply(rows: Float[Array, "rows heads width"]) -> Float[Array, "rows heads result"]:
        product = jax.lax.dot_general(
            rows,
            weight,
            (((2,), (contract,)), ((1,), (0,))),
            precision=jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        return product.astype(x.dtype).swapaxes(0, 1)

    return by_row_tiles(multiply, x)


def _widened(
    x: Float[Array, "tokens heads width"], width: int
) -> Float[Array, "tokens heads widened"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2])))

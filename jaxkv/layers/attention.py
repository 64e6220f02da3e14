"""Grouped-query attention over pages: fused QKV projection, rotation, cache write, attention, output projection."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.batch import PagedTables, StepBatch
from jaxkv.config.blocks import QueryGrowth
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.linear import Joining, Normed, matmul
from jaxkv.layers.norm import rms_norm, rms_norms
from jaxkv.layers.rope import Angles, grow, rotate
from jaxkv.layers.shards import Shards
from pallas_kernels import page_write, paged_attention, ragged_attention, rotary_write
from pallas_kernels.dispatch import xla_if
from pallas_kernels.families import WIDEST_HEAD, member
from pallas_kernels.formats.quantise import quantise

# The roles of a layer's pages, in the order of the ops' arguments.
_ROLES = ("key", "value", "key_scale", "value_scale")


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes and options of one layer's attention.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and values; each serves `heads / kv_heads` query heads.
        head_dim: components of a head.
        scale: factor of attention scores; `None` for `head_dim ** -0.5`.
        norm_eps: epsilon of the norms on queries and keys.
        window: tokens that each token sees, its own included; `None` for all.
        soft_cap: soft cap of scores, `soft_cap * tanh(scores / soft_cap)`; `None` for none.
        query_growth: factor of queries that grows with their position; `None` for none.
        value_norm: values are normalised per head, without weights.
        gated: "qkv" begins with [heads * head_dim] rows of gates, whose sigmoid multiplies attention's output.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None = None
    norm_eps: float = 1e-6
    window: int | None = None
    soft_cap: float | None = None
    query_growth: QueryGrowth | None = None
    value_norm: bool = False
    gated: bool = False

    @property
    def scale_of_scores(self) -> float:
        """The factor of attention scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


def attention(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"] | Normed,
    batch: StepBatch,
    tables: PagedTables,
    angles: Angles,
    *,
    sizes: AttentionSizes,
    shards: Shards | None = None,
    joining: Joining | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Any]:
    """Writes the new tokens' keys and values to the pages, and attends causally.

    Args:
        params: "qkv" [(heads + 2 * kv_heads) * head_dim, hidden_size], queries first, then keys, then values;
            "o" [hidden_size, heads * head_dim]. If the model has them: "qkv_bias" and "o_bias"; "qk_norm"
            [2, head_dim], the weights of the norms on queries and keys; "wide_q_norm" and "wide_k_norm", the weights of
            norms over all heads together; "late_qk_norm" [2, head_dim], the weights of norms after the rotation;
            "sinks" [heads], float32, one logit per head that takes part in the softmax and has no value (Xiao et al.,
            Efficient Streaming Language Models).
        layer_cache: the layer's pages, "key" and "value"; for 8-bit formats also "key_scale" and "value_scale".
        x: normalised hidden states.
        batch: the step's metadata.
        tables: page table and write slots of the layer's group.
        angles: from `rope_angles`.
        sizes: sizes and options.
        shards: the devices that divide the heads, which a norm over all of them needs; `None` for one device.
        joining: the residual stream to which the output projection adds; `None` to return the output alone.
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The layer's pages after the write, and the output [tokens, hidden_size], or the sum with `joining`.
    """
    run = partial(matmul, implementation=implementation)
    qkv = run(params["qkv"], x, bias=params.get("qkv_bias"))
    with _family_of(sizes.head_dim, implementation) as family:
        layer_cache, mixed = attend_projected(
            params,
            layer_cache,
            qkv,
            batch,
            tables,
            angles,
            sizes=sizes,
            shards=shards,
            implementation=family,
        )
    return layer_cache, run(params["o"], mixed, bias=params.get("o_bias"), joining=joining)


def attention_to_earlier_keys(
    params: LayerParams,
    earlier_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    batch: StepBatch,
    tables: PagedTables,
    angles: Angles,
    *,
    sizes: AttentionSizes,
    implementation: str | None = None,
) -> Float[Array, "tokens hidden_size"]:
    """Attends causally to the keys and values of an earlier layer (Brandon et al., Cross-Layer Attention).

    Args:
        params: "q" [heads * head_dim, hidden_size]; "o" [hidden_size, heads * head_dim]; "q_norm" [head_dim], the
            weights of the norm on queries, if the model has it.
        earlier_cache: the pages of the earlier layer, which has written this step's tokens.
        x: normalised hidden states.
        batch: the step's metadata.
        tables: page table of the earlier layer's group.
        angles: from `rope_angles`.
        sizes: sizes and options, those of the earlier layer.
        implementation: family of implementations that every op must use; `None` for the best.
    """
    run = partial(matmul, implementation=implementation)
    q = run(params["q"], x).reshape(len(x), sizes.heads, sizes.head_dim)
    if "q_norm" in params:
        q = rms_norm(params["q_norm"], q, eps=sizes.norm_eps)
    with _family_of(sizes.head_dim, implementation) as family:
        mixed = _mix(
            earlier_cache,
            rotate(angles, q),
            batch,
            tables,
            scale=sizes.scale_of_scores,
            window=sizes.window,
            soft_cap=sizes.soft_cap,
            sinks=None,
            implementation=family,
        )
    return run(params["o"], mixed.reshape(len(x), -1))


def _family_of(head_dim: int, implementation: str | None) -> AbstractContextManager[str | None]:
    """Returns the family that attends with heads of this width; no kernel takes the widest ones (Gemma 4)."""
    refusal = None
    if head_dim > WIDEST_HEAD:
        refusal = f"heads have at most {WIDEST_HEAD} components there, got {head_dim}"
    return xla_if(refusal, op="attention", implementation=implementation)


def attend_projected(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    qkv: Float[Array, "tokens qkv_size"],
    batch: StepBatch,
    tables: PagedTables,
    angles: Angles,
    *,
    sizes: AttentionSizes,
    shards: Shards | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Float[Array, "tokens heads_size"]]:
    """Computes `attention` between its two projections; `qkv` is the output of the first one."""
    heads, kv_heads, head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    gate, qkv = jnp.split(qkv, (heads * head_dim if sizes.gated else 0,), axis=1)
    if "wide_q_norm" in params:
        bounds = (heads * head_dim, (heads + kv_heads) * head_dim)
        q, k, v = jnp.split(qkv, bounds, axis=1)
        pairs = [(params["wide_q_norm"], q), (params["wide_k_norm"], k)]
        q, k = rms_norms(pairs, eps=sizes.norm_eps, shards=shards)
        qkv = jnp.concatenate((q, k, v), axis=1)
    qkv = qkv.reshape(len(qkv), heads + 2 * kv_heads, head_dim)
    late = params.get("late_qk_norm")
    # A rotation changes no root mean square, so the division of a norm after the rotation may come before it.
    norm = params.get("qk_norm") if late is None else jnp.ones_like(late)
    roles = [role for role in _ROLES if role in layer_cache]
    q, pools = rotary_write(
        tuple(layer_cache[role] for role in roles),
        qkv,
        *angles,
        tables.write_slots,
        norm=norm,
        norm_eps=sizes.norm_eps,
        value_norm=sizes.value_norm,
        implementation=member(implementation, "rotary_write"),
    )
    layer_cache = dict(zip(roles, pools, strict=True))
    if late is not None:
        # Keys are stored without their weight; a query's component has both, which gives the same products.
        weight = late[0].astype(jnp.float32) * late[1].astype(jnp.float32)
        q = (q.astype(jnp.float32) * weight[None, None]).astype(q.dtype)
    if sizes.query_growth is not None:
        q = grow(q, batch.positions, sizes.query_growth)
    mixed = _mix(
        layer_cache,
        q,
        batch,
        tables,
        scale=sizes.scale_of_scores,
        window=sizes.window,
        soft_cap=sizes.soft_cap,
        sinks=params.get("sinks"),
        implementation=implementation,
    )
    mixed = mixed.reshape(len(mixed), -1)
    if sizes.gated:
        gate = jax.nn.sigmoid(gate.astype(jnp.float32))
        mixed = (mixed.astype(jnp.float32) * gate).astype(mixed.dtype)
    return layer_cache, mixed


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
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Float[Array, "tokens heads head_dim"]]:
    """Writes keys and values to the layer's pages, then attends over the pages.

    The write comes first, because a token reads itself and earlier tokens of the same step from the pages.
    `AttentionSizes` documents `scale`, `window` and `soft_cap`, `attention` the others.
    """
    new = {"key": k, "value": v}
    if "key_scale" in layer_cache:
        stored = layer_cache["key"].dtype
        new["key"], new["key_scale"] = quantise(k, stored)
        new["value"], new["value_scale"] = quantise(v, stored)
    pools = page_write(
        tuple(layer_cache[role] for role in new),
        tuple(new.values()),
        tables.write_slots,
        implementation=member(implementation, "page_write"),
    )
    layer_cache = dict(zip(new, pools, strict=True))
    mixed = _mix(
        layer_cache,
        q,
        batch,
        tables,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        implementation=implementation,
    )
    return layer_cache, mixed


def _mix(
    layer_cache: Mapping[str, Array],
    q: Float[Array, "tokens heads head_dim"],
    batch: StepBatch,
    tables: PagedTables,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " heads"] | None,
    implementation: str | None,
) -> Float[Array, "tokens heads head_dim"]:
    """Attends over the layer's pages in any storage format."""
    keys, values = layer_cache["key"], layer_cache["value"]
    k_scales, v_scales = layer_cache.get("key_scale"), layer_cache.get("value_scale")
    # The ops need queries in the pages' dtype, which may be narrower than the parameters'; quantised pages do not.
    queries = q.astype(keys.dtype) if k_scales is None else q
    if batch.decode:
        mixed = paged_attention(
            queries,
            keys,
            values,
            tables.page_table,
            batch.seq_lens,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            k_scales=k_scales,
            v_scales=v_scales,
            shared=tables.shared,
            implementation=member(implementation, "paged_attention"),
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
            soft_cap=soft_cap,
            sinks=sinks,
            k_scales=k_scales,
            v_scales=v_scales,
            implementation=member(implementation, "ragged_attention"),
        )
    return mixed.astype(q.dtype)

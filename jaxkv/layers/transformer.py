"""A transformer block without residual additions, which reads the embeddings too (Glorioso et al., Zamba2)."""

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.batch import PagedTables, StepBatch
from jaxkv.layers.adapted import LayerParams
from jaxkv.layers.attention import AttentionSizes, attend_projected
from jaxkv.layers.linear import matmul, project
from jaxkv.layers.norm import rms_norm
from jaxkv.layers.rope import Angles
from jaxkv.layers.shards import Shards
from pallas_kernels.activations import gate


def transformer_block(
    params: LayerParams,
    layer_cache: Mapping[str, Array],
    x: Float[Array, "tokens hidden_size"],
    embeddings: Float[Array, "tokens hidden_size"],
    batch: StepBatch,
    tables: PagedTables,
    angles: Angles,
    *,
    activation: str,
    sizes: AttentionSizes,
    shards: Shards | None = None,
    implementation: str | None = None,
) -> tuple[dict[str, Array], Float[Array, "tokens hidden_size"]]:
    """Computes attention, a gated feed-forward and a projection, each on the output of the one before.

    Args:
        params: "side_norm" [2 * hidden_size], the norm of `x` beside the embeddings; "qkv"
            [(heads + 2 * kv_heads) * head_dim, 2 * hidden_size] and "o" [hidden_size, heads * head_dim]; "inner_norm"
            [hidden_size], the norm of attention's output; "gate_up" [2 * ffn, hidden_size] and "down"
            [hidden_size, ffn]; "gate_up_adapter_in" [rank, hidden_size] and "gate_up_adapter_out" [2 * ffn, rank];
            "side_out" [hidden_size, hidden_size]. If the model has them: "qkv_adapter_in" [3, rank, 2 * hidden_size]
            and "qkv_adapter_out" [3, heads * head_dim, rank], "gate_up_bias" and "down_bias".
        layer_cache: the layer's pages.
        x: the residual stream.
        embeddings: the tokens' embeddings.
        batch: the step's metadata.
        tables: page table and write slots of the layer's group.
        angles: from `rope_angles`.
        activation: name of the feed-forward's activation.
        sizes: sizes and options of the attention; its `norm_eps` is that of all norms.
        shards: the devices that divide heads and feed-forward; `None` for one device. The output is then a part of a
            sum over them, since "side_out" projects the parts of the feed-forward's output.
        implementation: family of implementations that every op must use; `None` for the best.

    Returns:
        The layer's pages after the write, and the output.
    """
    run = partial(matmul, implementation=implementation)
    wide = jnp.concatenate((x, embeddings.astype(x.dtype)), axis=1)
    wide = rms_norm(params["side_norm"], wide, eps=sizes.norm_eps)
    qkv = run(params["qkv"], wide)
    if "qkv_adapter_in" in params:
        adapters = zip(params["qkv_adapter_in"], params["qkv_adapter_out"], strict=True)
        qkv += jnp.concatenate([_adapted(*adapter, wide) for adapter in adapters], axis=1)
    layer_cache, mixed = attend_projected(
        params, layer_cache, qkv, batch, tables, angles, sizes=sizes, implementation=implementation
    )
    attended = run(params["o"], mixed)
    attended = attended if shards is None else shards.summed(attended)
    inner = rms_norm(params["inner_norm"], attended, eps=sizes.norm_eps)
    gate_up = run(params["gate_up"], inner, bias=params.get("gate_up_bias"))
    gate_up += _adapted(params["gate_up_adapter_in"], params["gate_up_adapter_out"], inner)
    inner = run(params["down"], gate(gate_up, activation=activation), bias=params.get("down_bias"))
    return layer_cache, run(params["side_out"], inner)


def _adapted(
    down: Float[Array, "rank in"], up: Float[Array, "out rank"], x: Float[Array, "tokens in"]
) -> Float[Array, "tokens out"]:
    """Returns the term that a low-rank adapter adds to a projection."""
    return project(up, project(down, x))

"""Decode steps of few rows of a plain decoder: attention, and one kernel for all between two attentions.

Which layers that kernel takes, `pallas_kernels.skinny_matmul.mosaic_tail` says.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.block_config import Multipliers
from jaxkv.cache.state import Cache
from jaxkv.layers.attention import attend_projected
from jaxkv.layers.linear import matmul
from jaxkv.layers.norm import rms_norm
from jaxkv.layers.rope import Angles
from jaxkv.model_config import ModelConfig
from jaxkv.models.mixers import attention_options
from jaxkv.models.protocol import Params
from pallas_kernels.dispatch import at
from pallas_kernels.skinny_matmul.mosaic_tail import Norms, layer_tail, why_not

IS_ON = False
"""Whether steps run this way. Off: on an H200 it was no faster than one kernel per product (NOTES.md of skinny_matmul),
and its blocks wait for each other, so they must all be resident at once, which nothing but an idle card promises."""

_FAMILY = "mosaic_gpu"
_PATTERN = ("attention", "gated")
_PRODUCTS = ("o", "gate_up", "down", "qkv")
# What a layer may have for its tail to be nothing but those products and norms.
_KNOWN = {*_PRODUCTS, "norms", "qk_norm", "sinks"}


def is_chained(
    config: ModelConfig, params: Params, batch: StepBatch, implementation: str | None
) -> bool:
    """Tells whether a step runs this way: it is on, our kernels, a token per row, and nothing else in any layer."""
    if not IS_ON:
        return False
    layers = params["layers"]
    plain = config.multipliers == Multipliers(
        embedding=config.multipliers.embedding, logits=config.multipliers.logits
    )
    if implementation != _FAMILY or not batch.decode or not plain or config.wide_residual:
        return False
    if any(stages != _PATTERN for stages in config.pattern):
        return False
    if any(weights.keys() - _KNOWN for weights in layers):
        return False
    dtype = params["embed"].dtype
    return all(
        why_not(_products(layers, layer), batch.tokens.shape[0], dtype, config.activation) is None
        for layer in range(len(layers))
    )


def run_chained(
    config: ModelConfig,
    params: Params,
    cache: Cache,
    hidden: Float[Array, "tokens hidden_size"],
    batch: StepBatch,
    tables: Mapping[tuple[int, str], PagedTables | StateTables],
    angles: tuple[Angles, Angles],
    *,
    layer_offset: int,
    implementation: str | None,
) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
    """Runs all layers and the last norm; arguments as `Decoder.forward` has them."""
    layers = params["layers"]
    x = rms_norm(layers[0]["norms"][0], hidden, eps=config.norm_eps)
    qkv: Any = matmul(layers[0]["qkv"], x, implementation=implementation)
    met = jnp.zeros(1, jnp.int32)
    for layer, weights in enumerate(layers):
        place = layer_offset + layer
        of_layer = tables[place, "page"]
        assert isinstance(of_layer, PagedTables)
        with at(f"layer {layer}"):
            updates, mixed = attend_projected(
                weights,
                cache.layer(place),
                qkv,
                batch,
                of_layer,
                angles[config.windows[layer] is not None],
                implementation=implementation,
                **attention_options(config, layer),
            )
        cache = cache.with_layer(place, updates)
        arrays = _products(layers, layer) | {"norms": weights["norms"]}
        if layer + 1 < len(layers):
            arrays["next_norms"] = layers[layer + 1]["norms"]
        norms = Norms(here=1, after=0, eps=config.norm_eps)
        hidden, qkv, met = layer_tail(
            mixed, hidden, arrays, met, activation=config.activation, norms=norms
        )
    return cache, rms_norm(params["final_norm"], hidden, eps=config.norm_eps)


def _products(layers: tuple[Mapping[str, Array], ...], layer: int) -> dict[str, Array]:
    """Returns the weights of a layer's tail, the next layer's first product included."""
    found = {name: layers[layer][name] for name in _PRODUCTS[:-1]}
    if layer + 1 < len(layers):
        found["qkv"] = layers[layer + 1]["qkv"]
    return found

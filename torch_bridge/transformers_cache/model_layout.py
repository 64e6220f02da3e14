"""Cache specs of each layer of a Transformers model, derived from its config and modules."""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from jaxkv.cache.spec import ArraySpec, LayerSpec, PagedSpec, StateSpec
from jaxkv.cache.variants import gqa, window
from pallas_kernels.dispatch import Unsupported
from torch_bridge.transformers_cache.forward_call import CACHE_NAMES
from torch_bridge.transformers_cache.state_layout import mixers_by_layer, state_spec

_DTYPES = ("float32", "bfloat16", "float16")
_ATTENTION = ("full_attention", "sliding_attention")
_STATES = ("linear_attention", "conv")
_BOTH = "hybrid"
"""Kind of a layer with full attention and a recurrent mixer side by side."""
_NOTHING = ("mlp", "moe")
_LOOKS_AHEAD = "attends to later tokens, as a decoder too, so its keys cannot be kept"
_UNFIT = {
    "big_bird": _LOOKS_AHEAD,
    "cpmant": "puts a prompt of its own before the tokens, which takes columns of the cache",
    "doge": "attends to later tokens where no mask is made, as with sdpa and without padding",
    "gpt_neox_japanese": "takes keys as one contiguous array, which those gathered from pages are not",
    "megatron-bert": _LOOKS_AHEAD,
    "prophetnet": "keeps the keys of several streams of tokens",
    "recurrent_gemma": "keeps the states of its recurrent layers in its modules, where no cache reaches them",
    "rembert": _LOOKS_AHEAD,
    "roformer": _LOOKS_AHEAD,
}
"""Model type -> reason why it cannot use pages, for models whose config and modules do not show it."""


@dataclass(frozen=True)
class LayerPlan:
    """Cache needs of one layer.

    Attributes:
        kind: Transformers' name of the layer's type.
        specs: the layer's cache specs; empty for layers that are feed-forward only.
        window: tokens a query sees, itself included; `None` for all.
    """

    kind: str
    specs: tuple[PagedSpec | StateSpec, ...]
    window: int | None = None


def plan_layers(model: PreTrainedModel, *, page_size: int) -> tuple[LayerPlan, ...]:
    """Returns the cache plan of each layer.

    Raises:
        Unsupported: the model has layers whose state the cache cannot store, is not a causal decoder, or is on several
            devices.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise Unsupported(
            f"{name} has an encoder, and JaxkvCache is for decoders alone; use Transformers' EncoderDecoderCache"
        )
    if why := _why_unfit(model):
        raise Unsupported(f"{name} {why}; generate without a JaxkvCache")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise Unsupported(
            f"JaxkvCache needs a model on one device, this one is on {sorted(map(str, devices))}"
        )
    dtype = str(model.dtype)[6:]
    if dtype not in _DTYPES:
        raise Unsupported(f"JaxkvCache keeps {', '.join(_DTYPES)}, the model computes in {dtype}")
    config = model.config.get_text_config(decoder=True)
    kinds, options = get_layer_types_and_kwargs(config)
    heads, mixers = _heads_by_layer(model), mixers_by_layer(model)
    plans = []
    for layer, kind in enumerate(kinds):
        states: tuple[StateSpec, ...] = ()
        if kind in (*_STATES, _BOTH):
            states = (state_spec(config, layer, mixers.get(layer), dtype),)
        if kind in (*_STATES, *_NOTHING):
            plans.append(LayerPlan(kind, states))
            continue
        seen = "full_attention" if kind == _BOTH else kind
        attention = _plan(seen, layer, config, options, heads, dtype, page_size)
        plans.append(LayerPlan(kind, (*attention.specs, *states), attention.window))
    return tuple(plans)


def layer_specs(plans: tuple[LayerPlan, ...]) -> tuple[LayerSpec, ...]:
    """Returns the specs of all layers, each with its layer index."""
    return tuple(LayerSpec(layer, spec) for layer, plan in enumerate(plans) for spec in plan.specs)


def _plan(
    kind: str,
    layer: int,
    config: Any,  # noqa: ANN401 - every family has a class of its own
    options: Mapping[str, Any],
    heads: Mapping[int, tuple[int, int]],
    dtype: str,
    page_size: int,
) -> LayerPlan:
    if kind not in _ATTENTION:
        raise Unsupported(
            f"layer {layer} is {kind} of {type(config).__name__}; JaxkvCache supports {', '.join(_ATTENTION)} with "
            f"keys and values per head or latents, and recurrent layers it knows. Use Transformers' DynamicCache "
            f"for this model"
        )
    if caches_latents(config):
        return LayerPlan(kind, (_latent(config, dtype, page_size),))
    kv_heads, head_dim = heads.get(layer) or _heads_of(config)
    if kind == "full_attention":
        spec = gqa(kv_heads, head_dim, dtype=dtype, page_size=page_size)
        return LayerPlan(kind, (spec,))
    seen = int(options["sliding_window"])
    spec = window(kv_heads, head_dim, window=seen, dtype=dtype, page_size=page_size)
    return LayerPlan(kind, (spec,), seen)


def caches_latents(config: Any) -> bool:  # noqa: ANN401 - every family has a class of its own
    """Whether attention layers cache latents, from which each forward makes all keys and values (DeepSeek-V2's MLA)."""
    return getattr(config, "kv_lora_rank", None) is not None


def _latent(config: Any, dtype: str, page_size: int) -> PagedSpec:  # noqa: ANN401
    """Returns the spec of latents in Transformers' form: the latent is the key and the rotary key the value."""
    arrays = (
        ArraySpec("key", (1, config.kv_lora_rank), dtype),
        ArraySpec("value", (1, config.qk_rope_head_dim), dtype),
    )
    return PagedSpec("latent", arrays, page_size)


def _why_unfit(model: PreTrainedModel) -> str | None:
    """Returns why a model cannot use pages of keys, regardless of its layers' types, or `None` if it can."""
    names = signature(model.forward).parameters
    if "input_ids" in names and not any(name in names for name in CACHE_NAMES):
        return f"takes no cache: its forward has none of the arguments {', '.join(CACHE_NAMES)}"
    config = model.config.get_text_config(decoder=True)
    if config.model_type in _UNFIT:
        return _UNFIT[config.model_type]
    setting = _non_causal_setting(model, config)
    if setting:
        return f"is not causal ({setting}), so its keys depend on later tokens and cannot be kept"
    return None


def _non_causal_setting(model: PreTrainedModel, config: Any) -> str | None:  # noqa: ANN401
    """Returns the setting that makes the decoder attend to later tokens, or `None` if it is causal."""
    if not getattr(config, "is_causal", True):
        return "is_causal=False in its config"
    both_ways = getattr(config, "use_bidirectional_attention", None)
    # Other values are for images, whose forwards receive extra tensors.
    if both_ways in (True, "all"):
        return f"use_bidirectional_attention={both_ways!r} in its config"
    for module in model.get_decoder().modules():
        name, is_decoder = type(module).__name__, getattr(module, "is_decoder", None)
        if is_decoder is False:
            return f"is_decoder=False in {name}"
        # Cross-attention and vision towers are not causal either, but their layers have no `layer_idx`.
        numbered = isinstance(getattr(module, "layer_idx", None), int)
        if is_decoder is None and numbered and getattr(module, "is_causal", True) is False:
            return f"is_causal=False in {name}"
    return None


def _heads_by_layer(model: torch.nn.Module) -> dict[int, tuple[int, int]]:
    """Returns layer -> (kv_heads, head_dim), for layers whose `k_proj` and `head_dim` show them."""
    found = {}
    for module in model.modules():
        projection, head_dim = getattr(module, "k_proj", None), getattr(module, "head_dim", None)
        layer = getattr(module, "layer_idx", None)
        if (
            isinstance(projection, torch.nn.Linear)
            and isinstance(head_dim, int)
            and layer is not None
        ):
            found[layer] = (projection.out_features // head_dim, head_dim)
    return found


def _heads_of(config: Any) -> tuple[int, int]:  # noqa: ANN401
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise Unsupported(
            f"{type(config).__name__} has no num_attention_heads, so the sizes of its layers are unknown; "
            f"use Transformers' DynamicCache for this model"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    # Falcon has one KV head (multi-query); its new decoder architecture repeats it for all heads before caching.
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        return 1, head_dim
    return getattr(config, "num_key_value_heads", None) or heads, head_dim

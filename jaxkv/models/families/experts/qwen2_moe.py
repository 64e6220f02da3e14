"""Qwen1.5-MoE and Qwen2 with experts: Qwen2 whose feed-forward has many small experts and a gated shared one."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.experts.qwen3_moe import qwen_feed_forwards, take_qwen_mixture
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_BLOCKS,
    layer_windows,
    llama_rules,
    read_llama_like,
    take_nullable_int,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, gated_experts, gated_shared_expert


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "qwen2_moe"."""
    keys = ConfigJson(raw)
    feed_forwards = qwen_feed_forwards(keys, take_num_layers(keys), "mixture+shared")
    return read_llama_like(
        keys,
        "qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        kv_heads=16,
        max_positions=32768,
        windows=_windows(keys),
        qkv_bias=keys.take_bool("qkv_bias", True),
        pattern=tuple(("attention", feed_forward) for feed_forward in feed_forwards),
        mixture=take_qwen_mixture(
            keys,
            experts=60,
            top_k=4,
            size=1408,
            shared_size=5632,
            renormalise=keys.take_bool("norm_topk_prob", False),
        ),
    )


def _windows(keys: ConfigJson) -> tuple[int | None, ...]:
    """Returns the window of each layer, which `layer_types` must name if windows are used."""
    used = keys.take_bool("use_sliding_window", False)
    window = take_nullable_int(keys, "sliding_window", 4096) if used else None
    keys.ignore("max_window_layers sliding_window")
    if window is not None and keys.take("layer_types", None) is None:
        raise UnknownConfig(
            "config.json sets use_sliding_window without layer_types; which layers of qwen2_moe have the window then "
            "differs between versions of Transformers: name the kind of each layer in layer_types"
        )
    return layer_windows(keys, window)


_RULES = llama_rules(
    *LLAMA_BLOCKS, *gated_experts(f"{LAYER}mlp"), *gated_shared_expert(f"{LAYER}mlp")
)

FAMILY = Family("qwen2_moe", from_hf, _RULES)

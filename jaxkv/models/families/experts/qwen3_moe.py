"""Qwen3 with experts, and the text part of Qwen3-VL with experts: many small ones in all or some layers."""

from collections.abc import Mapping
from functools import partial

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.dense.qwen3 import VL_THETA
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_BLOCKS,
    attention_biases,
    equal_windows,
    llama_rules,
    read_llama_like,
    require,
    take_nullable_int,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import with_theta
from jaxkv.weights.rule_parts import LAYER, gated_experts, layer_rule


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "qwen3_moe"."""
    keys = ConfigJson(raw)
    # Transformers gives a window to every layer or to none, and ignores max_window_layers.
    keys.ignore("max_window_layers")
    num_layers = take_num_layers(keys)
    used = keys.take_bool("use_sliding_window", False)
    window = take_nullable_int(keys, "sliding_window", 4096)
    feed_forwards = qwen_feed_forwards(keys, num_layers, "mixture")
    return read_llama_like(
        keys,
        "qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        kv_heads=4,
        max_positions=32768,
        windows=equal_windows(keys, window if used else None, "qwen3_moe"),
        qk_norm=True,
        pattern=tuple(("attention", feed_forward) for feed_forward in feed_forwards),
        mixture=MixtureConfig(
            experts=take_experts(keys, 128),
            top_k=keys.take_int("num_experts_per_tok", 8, high=MAX_EXPERTS),
            size=keys.take_int("moe_intermediate_size", 768),
            gated=True,
            renormalise=keys.take_bool("norm_topk_prob", False),
        ),
        **attention_biases(keys),
    )


def qwen_feed_forwards(keys: ConfigJson, num_layers: int, experts: str) -> list[str]:
    """Returns each layer's feed-forward stage.

    Args:
        keys: config.json.
        num_layers: number of layers.
        experts: the stage of every `decoder_sparse_step`-th layer, unless `mlp_only_layers` names it.
    """
    step = keys.take_int("decoder_sparse_step", 1)
    dense = keys.take("mlp_only_layers", None) or []
    if not isinstance(dense, list) or any(layer not in range(num_layers) for layer in dense):
        raise UnknownConfig(
            f"config.json: mlp_only_layers must name layers below {num_layers}, got {str(dense)[:80]}"
        )
    return [
        "gated" if layer in dense or (layer + 1) % step else experts for layer in range(num_layers)
    ]


def take_experts(keys: ConfigJson, default: int) -> int:
    """Returns the number of experts: `num_experts`, or Transformers 5's `num_local_experts`."""
    name = "num_local_experts" if keys.has("num_local_experts") else "num_experts"
    return keys.take_int(name, default, high=MAX_EXPERTS)


def take_qwen_mixture(
    keys: ConfigJson, *, experts: int, top_k: int, size: int, shared_size: int, renormalise: bool
) -> MixtureConfig:
    """Returns the sizes of the experts and of the shared one, whose output has a gate (Qwen2-MoE, Qwen3-Next).

    Args:
        keys: config.json.
        experts: Transformers' default number.
        top_k: Transformers' default.
        size: Transformers' default of an expert's inner width.
        shared_size: Transformers' default of the shared expert's.
        renormalise: see `MixtureConfig`.
    """
    return MixtureConfig(
        experts=take_experts(keys, experts),
        top_k=keys.take_int("num_experts_per_tok", top_k, high=MAX_EXPERTS),
        size=keys.take_int("moe_intermediate_size", size),
        gated=True,
        renormalise=renormalise,
        shared_size=keys.take_int("shared_expert_intermediate_size", shared_size),
        shared_gate=True,
    )


def vl_from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "qwen3_vl_moe_text", the text part of Qwen3-VL with experts."""
    keys = ConfigJson(with_theta(raw, VL_THETA))
    feed_forwards = qwen_feed_forwards(keys, take_num_layers(keys), "mixture")
    # Transformers' router always renormalises, and files repeat it.
    require(keys, "qwen3_vl_moe_text", norm_topk_prob=True)
    return read_llama_like(
        keys,
        "qwen3_vl_moe_text",
        architecture="Qwen3VLMoeForConditionalGeneration",
        kv_heads=16,
        max_positions=128000,
        tied=True,
        qk_norm=True,
        pattern=tuple(("attention", feed_forward) for feed_forward in feed_forwards),
        mixture=MixtureConfig(
            experts=take_experts(keys, 60),
            top_k=keys.take_int("num_experts_per_tok", 4, high=MAX_EXPERTS),
            size=keys.take_int("moe_intermediate_size", 1408),
            gated=True,
        ),
        **attention_biases(keys),
    )


_RULES = llama_rules(*LLAMA_BLOCKS, *gated_experts(f"{LAYER}mlp"))

_experts = partial(layer_rule, block="mixture", prefix=f"{LAYER}mlp.")
_VL_RULES = llama_rules(
    *LLAMA_BLOCKS,
    _experts("router", "gate.weight"),
    # The input axis comes first in published files, and last in those that Transformers saves.
    _experts("experts_up", "experts.gate_up_proj", either_last=True),
    _experts("experts_down", "experts.down_proj", combine="transpose", either_last=True),
)

FAMILY = Family("qwen3_moe", from_hf, _RULES)
VL_TEXT = Family("qwen3_vl_moe_text", vl_from_hf, _VL_RULES)

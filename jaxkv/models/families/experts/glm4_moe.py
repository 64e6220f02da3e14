"""GLM-4.5 to 4.7 (Z.ai): partial rotation, optional norms on queries and keys, DeepSeek-V3's experts and routing."""

from collections.abc import Mapping

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    FURTHER_LAYERS,
    LLAMA_BLOCKS,
    MTP_AFTER_LAST,
    llama_rules,
    read_llama_like,
    take_mtp_layers,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, gated_experts, shared_expert


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "glm4_moe"."""
    keys = ConfigJson(raw)
    num_layers = take_num_layers(keys)
    dense = keys.take_int("first_k_dense_replace", 1, low=0)
    size = keys.take_int("moe_intermediate_size", 1408)
    return read_llama_like(
        keys,
        "glm4_moe",
        architecture="Glm4MoeForCausalLM",
        kv_heads=8,
        max_positions=131072,
        norm_eps=1e-5,
        partial=0.5,
        qkv_bias=keys.take_bool("attention_bias", False),
        qk_norm=keys.take_bool("use_qk_norm", False),
        pattern=tuple(
            ("attention", "gated" if layer < dense else "mixture+shared")
            for layer in range(num_layers)
        ),
        mixture=MixtureConfig(
            experts=keys.take_int("n_routed_experts", 128, high=MAX_EXPERTS),
            top_k=keys.take_int("num_experts_per_tok", 8, high=MAX_EXPERTS),
            size=size,
            gated=True,
            scoring="sigmoid",
            correction=True,
            groups=keys.take_int("n_group", 1, high=MAX_EXPERTS),
            top_groups=keys.take_int("topk_group", 1, high=MAX_EXPERTS),
            renormalise=keys.take_bool("norm_topk_prob", True),
            scale=keys.take_float("routed_scaling_factor", 1.0),
            shared_size=size * keys.take_int("n_shared_experts", 1, high=MAX_EXPERTS),
        ),
        mtp_layers=take_mtp_layers(keys),
    )


_RULES = llama_rules(
    *LLAMA_BLOCKS,
    *gated_experts(f"{LAYER}mlp"),
    *shared_expert(f"{LAYER}mlp.shared_experts"),
    further_layers=FURTHER_LAYERS,
)

FAMILY = Family("glm4_moe", from_hf, _RULES, MTP_AFTER_LAST)

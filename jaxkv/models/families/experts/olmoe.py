"""OLMoE (Ai2): norms over all heads of queries and of keys together, and 64 small experts in every layer."""

from collections.abc import Mapping

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.experts.qwen3_moe import take_experts
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_BLOCKS,
    attention_biases,
    llama_rules,
    read_llama_like,
    require,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, gated_experts


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "olmoe"."""
    keys = ConfigJson(raw)
    # Bounds of queries, keys and values, which no published file has.
    require(keys, "olmoe", clip_qkv=None)
    return read_llama_like(
        keys,
        "olmoe",
        architecture="OlmoeForCausalLM",
        kv_heads=None,
        max_positions=4096,
        norm_eps=1e-5,
        wide_qk_norm=True,
        pattern=(("attention", "mixture"),) * take_num_layers(keys),
        mixture=MixtureConfig(
            experts=take_experts(keys, 64),
            top_k=keys.take_int("num_experts_per_tok", 8, high=MAX_EXPERTS),
            size=keys.take_int("intermediate_size"),
            gated=True,
            renormalise=keys.take_bool("norm_topk_prob", False),
        ),
        **attention_biases(keys),
    )


FAMILY = Family("olmoe", from_hf, llama_rules(*LLAMA_BLOCKS, *gated_experts(f"{LAYER}mlp")))

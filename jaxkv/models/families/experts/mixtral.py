"""Mixtral: Mistral whose feed-forward is a mixture of eight large experts in every layer."""

from collections.abc import Mapping

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_BLOCKS,
    equal_windows,
    llama_rules,
    read_llama_like,
    take_nullable_int,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import with_theta
from jaxkv.weights.rule_parts import LAYER, gated_experts

_THETA = 1e6


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "mixtral"."""
    keys = ConfigJson(with_theta(raw, _THETA))
    # The router's noise is added in training only.
    keys.ignore("router_jitter_noise")
    window = take_nullable_int(keys, "sliding_window", None)
    return read_llama_like(
        keys,
        "mixtral",
        architecture="MixtralForCausalLM",
        kv_heads=8,
        max_positions=4096 * 32,
        norm_eps=1e-5,
        windows=equal_windows(keys, window, "mixtral"),
        pattern=(("attention", "mixture"),) * take_num_layers(keys),
        mixture=MixtureConfig(
            experts=keys.take_int("num_local_experts", 8, high=MAX_EXPERTS),
            top_k=keys.take_int("num_experts_per_tok", 2, high=MAX_EXPERTS),
            size=keys.take_int("intermediate_size"),
            gated=True,
        ),
    )


MIXTRAL_NAMES = ("w1", "w3", "w2")
"""Names of an expert's gate, its factor and the projection of their product."""

_EXPERT_RULES = gated_experts(f"{LAYER}block_sparse_moe", MIXTRAL_NAMES, fused=f"{LAYER}mlp")

FAMILY = Family("mixtral", from_hf, llama_rules(*LLAMA_BLOCKS, *_EXPERT_RULES))

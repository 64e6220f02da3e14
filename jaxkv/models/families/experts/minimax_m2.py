"""MiniMax-M2 to M2.7: norms over all heads of queries and of keys together, and sigmoid routing among small experts."""

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.experts.mixtral import MIXTRAL_NAMES
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_BLOCKS,
    llama_rules,
    read_llama_like,
    require,
    take_nullable_int,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import with_theta
from jaxkv.weights.rule_parts import LAYER, gated_experts

_THETA = 5e6


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "minimax_m2"."""
    keys = ConfigJson(with_theta(raw, _THETA))
    num_layers = take_num_layers(keys)
    # MiniMax's own code reads these; Transformers has one value of each.
    require(
        keys,
        "minimax_m2",
        attn_type_list=[1] * num_layers,
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        shared_intermediate_size=0,
        use_qk_norm=True,
        use_routing_bias=True,
    )
    # The router's noise is added in training only.
    keys.ignore("router_jitter_noise")
    rotary_dim = take_nullable_int(keys, "rotary_dim", None)
    config = read_llama_like(
        keys,
        "minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        kv_heads=8,
        head_dim=128,
        max_positions=196608,
        partial=1.0,
        wide_qk_norm=True,
        pattern=(("attention", "mixture"),) * num_layers,
        mixture=MixtureConfig(
            experts=keys.take_int("num_local_experts", 256, high=MAX_EXPERTS),
            top_k=keys.take_int("num_experts_per_tok", 8, high=MAX_EXPERTS),
            size=keys.take_int("intermediate_size"),
            gated=True,
            scoring="sigmoid",
            correction=True,
        ),
    )
    if rotary_dim is None:
        return config
    if config.rope.kind == "proportional" and rotary_dim != config.head_dim:
        raise UnknownConfig(
            f"config.json sets rotary_dim = {rotary_dim} and rope_type = 'proportional', which rotates whole heads of "
            f"{config.head_dim} components; keep one of them"
        )
    # MiniMax's own code and vLLM read it, and Transformers reads `partial_rotary_factor` alone.
    if config.rope.rotary_dim not in (config.head_dim, rotary_dim):
        raise UnknownConfig(
            f"config.json sets rotary_dim = {rotary_dim}, but its partial_rotary_factor rotates "
            f"{config.rope.rotary_dim} of {config.head_dim} components"
        )
    return replace(config, rope=replace(config.rope, rotary_dim=rotary_dim))


_EXPERT_RULES = gated_experts(
    f"{LAYER}block_sparse_moe",
    MIXTRAL_NAMES,
    fused=f"{LAYER}mlp",
    correction="e_score_correction_bias",
    fused_correction=f"{LAYER}mlp.e_score_correction_bias",
)

FAMILY = Family("minimax_m2", from_hf, llama_rules(*LLAMA_BLOCKS, *_EXPERT_RULES))

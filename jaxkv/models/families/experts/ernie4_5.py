"""ERNIE 4.5 (Baidu): Llama with rotary pairs beside one another, and with balanced experts in larger ones."""

from collections.abc import Mapping

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    llama_rules,
    read_llama_like,
    require,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import with_theta
from jaxkv.weights.rule_parts import LAYER, attention, gated, gated_experts, shared_expert

_THETA = 5e5
_LEAST_SUM = 1e-12


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "ernie4_5"."""
    keys = _keys(raw)
    # All projections of attention and of the feed-forward have a bias, or none.
    biased = keys.take_bool("use_bias", False)
    return read_llama_like(
        keys,
        "ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        kv_heads=2,
        head_dim=128,
        max_positions=131072,
        norm_eps=1e-5,
        tied=True,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
    )


def moe_from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "ernie4_5_moe"."""
    keys = _keys(raw)
    # Baidu's own code reads these; Transformers has one value of each.
    require(
        keys,
        "ernie4_5_moe",
        use_bias=False,
        moe_gate="topk",
        moe_gate_act="softmax",
        moe_use_aux_free=True,
        moe_norm_min=_LEAST_SUM,
    )
    # Most tokens of an expert in training.
    keys.ignore("moe_capacity")
    size = keys.take_int("moe_intermediate_size", 1536)
    return read_llama_like(
        keys,
        "ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        kv_heads=4,
        max_positions=131072,
        norm_eps=1e-5,
        tied=True,
        pattern=_pattern(keys),
        mixture=MixtureConfig(
            experts=keys.take_int("moe_num_experts", 64, high=MAX_EXPERTS),
            top_k=keys.take_int("moe_k", 6, high=MAX_EXPERTS),
            size=size,
            gated=True,
            correction=True,
            wide_router=True,
            # A lower bound of the sum in Transformers; both are far below what a float32 sum of scores resolves.
            sum_eps=_LEAST_SUM,
            shared_size=size * keys.take_int("moe_num_shared_experts", 2, low=0, high=MAX_EXPERTS),
        ),
    )


def _pattern(keys: ConfigJson) -> tuple[tuple[str, ...], ...]:
    """Returns each layer's stages; every n-th one between two layers has experts."""
    num_layers = take_num_layers(keys)
    first = keys.take_int("moe_layer_start_index", 1, low=0)
    last = keys.take_int("moe_layer_end_index", -1, low=-1)
    every = keys.take_int("moe_layer_interval", 1)
    last = num_layers - 1 if last == -1 else last
    shared = keys.take_int("moe_num_shared_experts", 2, low=0, high=MAX_EXPERTS)
    experts = "mixture+shared" if shared else "mixture"
    return tuple(
        ("attention", experts if first <= layer <= last and (layer + 1) % every == 0 else "gated")
        for layer in range(num_layers)
    )


def _keys(raw: Mapping[str, object]) -> ConfigJson:
    """Returns the keys of a config.json, with the family's base of the rotary frequencies."""
    return ConfigJson(with_theta(raw, _THETA))


_BLOCKS = (*attention(f"{LAYER}self_attn", interleaved=True), *gated(f"{LAYER}mlp"))
_EXPERT_RULES = (
    *gated_experts(
        f"{LAYER}mlp",
        correction="moe_statics.e_score_correction_bias",
        correction_combine="only_row",
        fused_correction=f"{LAYER}mlp.gate.moe_statics.e_score_correction_bias",
    ),
    *shared_expert(f"{LAYER}mlp.shared_experts"),
)

FAMILIES = (
    Family("ernie4_5", from_hf, llama_rules(*_BLOCKS)),
    Family(
        "ernie4_5_moe",
        moe_from_hf,
        # The ignored ones predict further tokens.
        llama_rules(*_BLOCKS, *_EXPERT_RULES, ignored=(r"model\.mtp_.*",)),
    ),
)

"""GPT-OSS: attention sinks, a window in every other layer, experts with biases and a clamped activation."""

from collections.abc import Mapping
from functools import partial

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    attention_biases,
    layer_windows,
    llama_rules,
    read_llama_like,
    require,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import with_theta
from jaxkv.weights.rule_parts import LAYER, attention, layer_rule

_CLAMP = 7.0
_THETA = 150000.0
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": _THETA,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "gpt_oss"; its experts may be stored in 4 bits (MXFP4)."""
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw = {**raw, "rope_parameters": _ROPE}
    keys = ConfigJson(with_theta(raw, _THETA))
    # Repeats a value of the rotary part.
    keys.ignore("initial_context_length")
    top_k = keys.take_int("num_experts_per_tok", 4, high=MAX_EXPERTS)
    require(keys, "gpt_oss", experts_per_token=top_k, swiglu_limit=_CLAMP)
    window = keys.take_int("sliding_window", 128)
    return read_llama_like(
        keys,
        "gpt_oss",
        architecture="GptOssForCausalLM",
        kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        max_positions=131072,
        windows=layer_windows(keys, window, full_every=2),
        pattern=(("attention", "mixture"),) * take_num_layers(keys),
        sinks=True,
        wide_norms=True,
        mixture=MixtureConfig(
            experts=keys.take_int("num_local_experts", 128, high=MAX_EXPERTS),
            top_k=top_k,
            size=keys.take_int("intermediate_size"),
            gated=True,
            biases=True,
            clamp=_CLAMP,
        ),
        **attention_biases(keys, default=True),
    )


_experts = partial(layer_rule, block="mixture", prefix=f"{LAYER}mlp.")
_RULES = llama_rules(
    *attention(f"{LAYER}self_attn"),
    _experts("router", "router.weight"),
    _experts("router_bias", "router.bias"),
    # Rows of gate and up alternate, and the input axis comes first.
    _experts("experts_up", "experts.gate_up_proj", combine="deinterleave_transpose"),
    _experts("experts_up_bias", "experts.gate_up_proj_bias", combine="deinterleave"),
    _experts("experts_down", "experts.down_proj", combine="last_axis_first"),
    _experts("experts_down_bias", "experts.down_proj_bias"),
)

FAMILY = Family("gpt_oss", from_hf, _RULES)

"""GPT-OSS: attention sinks, a window in every other layer, experts with biases and a clamped activation."""

from collections.abc import Mapping

from jaxkv.config.blocks import MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    ROTARY_TABLES,
    TIED,
    layer_windows,
    read_llama_like,
    require,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import with_theta
from jaxkv.weights.rule_parts import LAYER, LEAF, attention, embeddings, norms
from jaxkv.weights.rules import Combine, Rule, RuleSet

_SIZE = 2**31 - 1
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
    top_k = keys.take_int("num_experts_per_tok", 4, high=2**16)
    require(keys, "gpt_oss", experts_per_token=top_k, swiglu_limit=_CLAMP)
    biases = keys.take_bool("attention_bias", True)
    window = keys.take_int("sliding_window", 128, high=_SIZE)
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
        qkv_bias=biases,
        o_bias=biases,
        sinks=True,
        wide_norms=True,
        mixture=MixtureConfig(
            experts=keys.take_int("num_local_experts", 128, high=2**16),
            top_k=top_k,
            size=keys.take_int("intermediate_size", high=_SIZE),
            gated=True,
            biases=True,
            clamp=_CLAMP,
        ),
    )


def _experts(leaf: str, name: str, combine: Combine = "copy") -> Rule:
    return Rule(f"{LEAF}{leaf}", (f"{LAYER}mlp.{name}",), combine, block="mixture")


_RULES = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.norm.weight"),
        norms(f"{LAYER}input_layernorm.weight", f"{LAYER}post_attention_layernorm.weight"),
        *attention(f"{LAYER}self_attn"),
        _experts("router", "router.weight"),
        _experts("router_bias", "router.bias"),
        # Rows of gate and up alternate, and the input axis comes first.
        _experts("experts_up", "experts.gate_up_proj", "deinterleave_transpose"),
        _experts("experts_up_bias", "experts.gate_up_proj_bias", "deinterleave"),
        _experts("experts_down", "experts.down_proj", "last_axis_first"),
        _experts("experts_down_bias", "experts.down_proj_bias"),
    ),
    ignored=(ROTARY_TABLES,),
    tied=TIED,
)

FAMILY = Family("gpt_oss", from_hf, _RULES)

"""GLM-4 (Zhipu AI): half of each head is rotated, in interleaved pairs; GLM-4-0414 has norms after the stages too."""

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import ROTARY_TABLES, TIED, read_llama_like, take_num_layers
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, LEAF, attention, embeddings, fused_gated, norms
from jaxkv.weights.rules import Rule, RuleSet


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "glm4" (GLM-4-0414)."""
    return replace(_read(raw, "glm4", "Glm4ForCausalLM"), post_norms=True)


def older_from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "glm" (GLM-4-9B)."""
    return _read(raw, "glm", "GlmForCausalLM")


def _read(raw: Mapping[str, object], family: str, architecture: str) -> ModelConfig:
    keys = ConfigJson(raw)
    return read_llama_like(
        keys,
        family,
        architecture=architecture,
        kv_heads=2,
        head_dim=128,
        max_positions=131072,
        norm_eps=1.5625e-7,
        partial=0.5,
        windows=(None,) * take_num_layers(keys),
        qkv_bias=keys.take_bool("attention_bias", True),
    )


_OLDER_RULES = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.norm.weight"),
        norms(f"{LAYER}input_layernorm.weight", f"{LAYER}post_attention_layernorm.weight"),
        *attention(f"{LAYER}self_attn", interleaved=True),
        *fused_gated(f"{LAYER}mlp"),
    ),
    ignored=(ROTARY_TABLES,),
    tied=TIED,
)
_RULES = replace(
    _OLDER_RULES,
    rules=(
        *_OLDER_RULES.rules,
        Rule(
            f"{LEAF}post_norms",
            (f"{LAYER}post_self_attn_layernorm.weight", f"{LAYER}post_mlp_layernorm.weight"),
            combine="stack",
        ),
    ),
)

FAMILIES = (
    Family("glm", older_from_hf, _OLDER_RULES),
    Family("glm4", from_hf, _RULES),
)

"""GLM-4 (Zhipu AI): half of each head is rotated, in interleaved pairs; GLM-4-0414 has norms after the stages too."""

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import llama_rules, read_llama_like
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, attention, fused_gated, post_norms


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
        qkv_bias=keys.take_bool("attention_bias", True),
    )


_OLDER_BLOCKS = (
    *attention(f"{LAYER}self_attn", interleaved=True),
    *fused_gated(f"{LAYER}mlp"),
)
_BLOCKS = (
    *_OLDER_BLOCKS,
    post_norms(f"{LAYER}post_self_attn_layernorm.weight", f"{LAYER}post_mlp_layernorm.weight"),
)

FAMILIES = (
    Family("glm", older_from_hf, llama_rules(*_OLDER_BLOCKS)),
    Family("glm4", from_hf, llama_rules(*_BLOCKS)),
)

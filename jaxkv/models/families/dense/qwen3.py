"""Qwen3 (dense), and the text part of Qwen3-VL: Qwen2 with norms on queries and keys instead of biases."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.models.families.dense.qwen2 import qwen_windows
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import LLAMA_RULES, attention_biases, read_llama_like
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import with_theta


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "qwen3"."""
    keys = ConfigJson(raw)
    return read_llama_like(
        keys,
        "qwen3",
        architecture="Qwen3ForCausalLM",
        kv_heads=32,
        max_positions=32768,
        head_dim=128,
        windows=qwen_windows(keys),
        qk_norm=True,
        **attention_biases(keys),
    )


VL_THETA = 5e5
"""Transformers' default base of the rotary frequencies in text parts of Qwen3-VL."""


def vl_from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "qwen3_vl_text", the text part of Qwen3-VL."""
    keys = ConfigJson(with_theta(raw, VL_THETA))
    return read_llama_like(
        keys,
        "qwen3_vl_text",
        architecture="Qwen3VLForConditionalGeneration",
        kv_heads=32,
        max_positions=128000,
        head_dim=128,
        qk_norm=True,
        **attention_biases(keys),
    )


FAMILY = Family("qwen3", from_hf, LLAMA_RULES)
VL_TEXT = Family("qwen3_vl_text", vl_from_hf, LLAMA_RULES)

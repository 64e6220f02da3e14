"""Qwen3 (dense): Qwen2 with norms on queries and keys instead of biases."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.models.families.dense.qwen2 import qwen_windows
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import LLAMA_RULES, attention_biases, read_llama_like
from jaxkv.models.hf_config.config_json import ConfigJson


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


FAMILY = Family("qwen3", from_hf, LLAMA_RULES)

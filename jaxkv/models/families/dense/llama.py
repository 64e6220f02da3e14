"""Llama 2, 3, 3.1 and later: optional biases, and all kinds of rotary scaling."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_RULES,
    attention_biases,
    layer_windows,
    read_llama_like,
)
from jaxkv.models.hf_config.config_json import ConfigJson


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "llama"."""
    keys = ConfigJson(raw)
    return read_llama_like(
        keys,
        "llama",
        architecture="LlamaForCausalLM",
        kv_heads=None,
        max_positions=2048,
        windows=layer_windows(keys, None),
        mlp_bias=keys.take_bool("mlp_bias", False),
        **attention_biases(keys),
    )


FAMILY = Family("llama", from_hf, LLAMA_RULES)

"""Mistral: Llama with a sliding window in every layer, or none if `sliding_window` is null."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_RULES,
    equal_windows,
    read_llama_like,
    take_nullable_int,
)
from jaxkv.models.hf_config.config_json import ConfigJson


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "mistral"."""
    keys = ConfigJson(raw)
    window = take_nullable_int(keys, "sliding_window", 4096)
    return read_llama_like(
        keys,
        "mistral",
        architecture="MistralForCausalLM",
        kv_heads=8,
        max_positions=4096 * 32,
        windows=equal_windows(keys, window, "mistral"),
    )


FAMILY = Family("mistral", from_hf, LLAMA_RULES)

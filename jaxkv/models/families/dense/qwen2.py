"""Qwen2 and Qwen2.5: biases on queries, keys and values, and optionally a sliding window in the upper layers."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_RULES,
    layer_windows,
    read_llama_like,
    take_nullable_int,
)
from jaxkv.models.hf_config.config_json import ConfigJson


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "qwen2"."""
    keys = ConfigJson(raw)
    # The family always has biases on queries, keys and values, and no others.
    keys.ignore("attention_bias qkv_bias use_qkv_bias add_qkv_bias")
    return read_llama_like(
        keys,
        "qwen2",
        architecture="Qwen2ForCausalLM",
        kv_heads=32,
        max_positions=32768,
        windows=qwen_windows(keys),
        qkv_bias=True,
    )


def qwen_windows(keys: ConfigJson) -> tuple[int | None, ...]:
    """Returns the window of each layer; the first `max_window_layers` layers have none."""
    used = keys.take_bool("use_sliding_window", False)
    window = take_nullable_int(keys, "sliding_window", 4096)
    full_layers = keys.take_int("max_window_layers", 28, low=0)
    return layer_windows(keys, window if used else None, full_layers=full_layers)


FAMILY = Family("qwen2", from_hf, LLAMA_RULES)

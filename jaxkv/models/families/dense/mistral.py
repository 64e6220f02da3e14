"""Mistral: Llama with a window in every layer, or none; Ministral 3 has queries that grow with their position."""

from collections.abc import Mapping

from jaxkv.config.blocks import QueryGrowth
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


# What Transformers takes if the file has no rotary keys.
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral_from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "ministral3" (Ministral 3, Devstral 2 and others)."""
    outer = ConfigJson(raw)
    name = "rope_scaling" if outer.take_object("rope_scaling") else "rope_parameters"
    rotary = {**(outer.take_object(name) or _MINISTRAL_ROPE)}
    growth = ConfigJson(rotary, place=f"config.json: {name}")
    query_growth = QueryGrowth(
        beta=growth.take_float("llama_4_scaling_beta"),
        length=growth.take_int("original_max_position_embeddings"),
    )
    # Transformers repeats the model's length here and does not read it.
    for key in ("llama_4_scaling_beta", "max_position_embeddings"):
        rotary.pop(key, None)
    keys = ConfigJson({**raw, name: rotary})
    window = take_nullable_int(keys, "sliding_window", None)
    return read_llama_like(
        keys,
        "ministral3",
        architecture="Ministral3ForCausalLM",
        kv_heads=8,
        head_dim=128,
        max_positions=262144,
        norm_eps=1e-5,
        windows=equal_windows(keys, window, "ministral3"),
        query_growth=query_growth,
    )


FAMILIES = (
    Family("mistral", from_hf, LLAMA_RULES),
    Family("ministral3", ministral_from_hf, LLAMA_RULES),
)

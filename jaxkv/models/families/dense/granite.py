"""Granite 3 and 4 (IBM), dense: Llama with factors of embeddings, residual additions, attention scores and logits."""

from collections.abc import Mapping
from typing import TypedDict

from jaxkv.config.blocks import Multipliers
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_RULES,
    attention_biases,
    read_llama_like,
)
from jaxkv.models.hf_config.config_json import ConfigJson


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "granite"."""
    keys = ConfigJson(raw)
    return read_llama_like(
        keys,
        "granite",
        architecture="GraniteForCausalLM",
        kv_heads=None,
        max_positions=2048,
        mlp_bias=keys.take_bool("mlp_bias", False),
        **granite_factors(keys),
        **attention_biases(keys),
    )


class GraniteFactors(TypedDict):
    """The fields of `ModelConfig` with Granite's constant factors."""

    attention_scale: float
    multipliers: Multipliers


def granite_factors(keys: ConfigJson) -> GraniteFactors:
    """Returns the factors of embeddings, residual additions, attention scores and logits."""
    return {
        "attention_scale": keys.take_float("attention_multiplier", 1.0),
        "multipliers": Multipliers(
            embedding=keys.take_float("embedding_multiplier", 1.0),
            residual=keys.take_float("residual_multiplier", 1.0),
            logits=1.0 / keys.take_float("logits_scaling", 1.0),
        ),
    }


FAMILY = Family("granite", from_hf, LLAMA_RULES)

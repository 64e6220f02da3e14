"""Seed-OSS (ByteDance): Llama with biases on queries, keys and values."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import LLAMA_RULES, read_llama_like
from jaxkv.models.hf_config.config_json import ConfigJson


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "seed_oss"."""
    keys = ConfigJson(raw)
    keys.ignore("residual_dropout")
    return read_llama_like(
        keys,
        "seed_oss",
        architecture="SeedOssForCausalLM",
        kv_heads=8,
        head_dim=128,
        max_positions=524288,
        qkv_bias=keys.take_bool("attention_bias", True),
        o_bias=keys.take_bool("attention_out_bias", False),
        mlp_bias=keys.take_bool("mlp_bias", False),
    )


FAMILY = Family("seed_oss", from_hf, LLAMA_RULES)

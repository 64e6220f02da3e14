"""Gemma 2: sliding windows in every other layer, soft-capped scores and logits, norms before and after each stage."""

from collections.abc import Mapping
from typing import TypedDict

from jaxkv.config.blocks import Multipliers
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    attention_biases,
    layer_windows,
    llama_rules,
    read_llama_like,
    take_nullable_float,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, attention, gated, post_norms


class Gemma(TypedDict):
    """The fields of `ModelConfig` that Gemma 2 and 3 set in the same way."""

    qkv_bias: bool
    o_bias: bool
    unit_offset: bool
    post_norms: bool
    attention_scale: float | None
    multipliers: Multipliers


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "gemma2"."""
    keys = ConfigJson(raw)
    return read_llama_like(
        keys,
        "gemma2",
        architecture="Gemma2ForCausalLM",
        kv_heads=4,
        head_dim=256,
        max_positions=8192,
        windows=layer_windows(keys, take_window(keys), full_every=2),
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
        attention_cap=take_nullable_float(keys, "attn_logit_softcapping", 50.0),
        logit_cap=take_nullable_float(keys, "final_logit_softcapping", 30.0),
        **gemma(keys),
    )


def gemma(keys: ConfigJson) -> Gemma:
    """Reads the keys that Gemma 2 and 3 have in common.

    Raises:
        UnknownConfig: attention is bidirectional.
    """
    # Superseded by hidden_activation; Transformers reads only that.
    keys.ignore("hidden_act")
    if keys.take("use_bidirectional_attention", None):
        raise UnknownConfig(
            "config.json sets use_bidirectional_attention; only causal attention is supported"
        )
    width = keys.take_int("hidden_size")
    return {
        **attention_biases(keys),
        "unit_offset": True,
        "post_norms": True,
        "attention_scale": keys.take_float("query_pre_attn_scalar", 256) ** -0.5,
        "multipliers": Multipliers(embedding=width**0.5),
    }


def take_window(keys: ConfigJson) -> int:
    """Returns the window of the sliding-window layers, in tokens."""
    return keys.take_int("sliding_window", 4096)


GEMMA_RULES = llama_rules(
    post_norms(
        f"{LAYER}post_attention_layernorm.weight",
        f"{LAYER}post_feedforward_layernorm.weight",
        offset=1.0,
    ),
    *attention(f"{LAYER}self_attn", offset=1.0),
    *gated(f"{LAYER}mlp"),
    norm_names=("input_layernorm", "pre_feedforward_layernorm"),
    offset=1.0,
)

FAMILY = Family("gemma2", from_hf, GEMMA_RULES)

"""Granite 3 with experts (IBM), with or without a shared one; Granite 4 has the same names of experts."""

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.config.blocks import MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.dense.granite import granite_factors
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_RULES,
    read_llama_like,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, LEAF
from jaxkv.weights.rules import Rule

_SIZE = 2**31 - 1
_EXPERTS = 2**16


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "granitemoe"."""
    return _read(ConfigJson(raw), "granitemoe", "GraniteMoeForCausalLM", shared_size=0)


def from_hf_shared(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "granitemoeshared"."""
    keys = ConfigJson(raw)
    shared = keys.take_int("shared_intermediate_size", 0, low=0, high=_SIZE)
    return _read(keys, "granitemoeshared", "GraniteMoeSharedForCausalLM", shared_size=shared)


def _read(keys: ConfigJson, family: str, architecture: str, *, shared_size: int) -> ModelConfig:
    num_layers = take_num_layers(keys)
    attention_bias = keys.take_bool("attention_bias", False)
    feed_forward = "mixture+shared" if shared_size else "mixture"
    return read_llama_like(
        keys,
        family,
        architecture=architecture,
        kv_heads=None,
        max_positions=2048,
        windows=(None,) * num_layers,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        pattern=(("attention", feed_forward),) * num_layers,
        # The family's softmax over the selected experts equals a softmax over all, renormalised.
        mixture=MixtureConfig(
            experts=keys.take_int("num_local_experts", 8, high=_EXPERTS),
            top_k=keys.take_int("num_experts_per_tok", 2, high=_EXPERTS),
            size=keys.take_int("intermediate_size", high=_SIZE),
            gated=True,
            shared_size=shared_size,
        ),
        **granite_factors(keys),
    )


_EXPERTS_AT, _SHARED_AT = f"{LAYER}block_sparse_moe", f"{LAYER}shared_mlp"

GRANITE_EXPERTS = (
    Rule(
        f"{LEAF}router",
        (f"{_EXPERTS_AT}.router.layer.weight",),
        block="mixture",
        fused=f"{_EXPERTS_AT}.router.weight",
    ),
    Rule(
        f"{LEAF}experts_up",
        (f"{_EXPERTS_AT}.input_linear.weight",),
        block="mixture",
        fused=f"{_EXPERTS_AT}.experts.gate_up_proj",
    ),
    Rule(
        f"{LEAF}experts_down",
        (f"{_EXPERTS_AT}.output_linear.weight",),
        combine="transpose",
        block="mixture",
        fused=f"{_EXPERTS_AT}.experts.down_proj",
    ),
    Rule(f"{LEAF}shared_up", (f"{_SHARED_AT}.input_linear.weight",), block="shared"),
    Rule(f"{LEAF}shared_down", (f"{_SHARED_AT}.output_linear.weight",), block="shared"),
)
"""The weights of Granite's experts."""

_RULES = replace(LLAMA_RULES, rules=(*LLAMA_RULES.rules, *GRANITE_EXPERTS))

FAMILIES = (
    Family("granitemoe", from_hf, _RULES),
    Family("granitemoeshared", from_hf_shared, _RULES),
)

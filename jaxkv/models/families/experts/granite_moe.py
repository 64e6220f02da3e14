"""Granite 3 with experts (IBM), with or without a shared one; Granite 4 has the same names of experts."""

from collections.abc import Mapping
from functools import partial

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.dense.granite import granite_factors
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_BLOCKS,
    attention_biases,
    llama_rules,
    read_llama_like,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, layer_rule


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "granitemoe"."""
    return _read(ConfigJson(raw), "granitemoe", "GraniteMoeForCausalLM", shared_size=0)


def from_hf_shared(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "granitemoeshared"."""
    keys = ConfigJson(raw)
    shared = keys.take_int("shared_intermediate_size", 0, low=0)
    return _read(keys, "granitemoeshared", "GraniteMoeSharedForCausalLM", shared_size=shared)


def _read(keys: ConfigJson, family: str, architecture: str, *, shared_size: int) -> ModelConfig:
    num_layers = take_num_layers(keys)
    feed_forward = "mixture+shared" if shared_size else "mixture"
    return read_llama_like(
        keys,
        family,
        architecture=architecture,
        kv_heads=None,
        max_positions=2048,
        pattern=(("attention", feed_forward),) * num_layers,
        # The family's softmax over the selected experts equals a softmax over all, renormalised.
        mixture=MixtureConfig(
            experts=keys.take_int("num_local_experts", 8, high=MAX_EXPERTS),
            top_k=keys.take_int("num_experts_per_tok", 2, high=MAX_EXPERTS),
            size=keys.take_int("intermediate_size"),
            gated=True,
            shared_size=shared_size,
        ),
        **granite_factors(keys),
        **attention_biases(keys),
    )


_EXPERTS = f"{LAYER}block_sparse_moe."

_mixture = partial(layer_rule, block="mixture", prefix=_EXPERTS)
_shared = partial(layer_rule, block="shared", prefix=f"{LAYER}shared_mlp.")

GRANITE_EXPERTS = (
    _mixture("router", "router.layer.weight", fused=f"{_EXPERTS}router.weight"),
    _mixture("experts_up", "input_linear.weight", fused=f"{_EXPERTS}experts.gate_up_proj"),
    _mixture(
        "experts_down",
        "output_linear.weight",
        combine="transpose",
        fused=f"{_EXPERTS}experts.down_proj",
    ),
    _shared("shared_up", "input_linear.weight"),
    _shared("shared_down", "output_linear.weight"),
)
"""The weights of Granite's experts."""

_RULES = llama_rules(*LLAMA_BLOCKS, *GRANITE_EXPERTS)

FAMILIES = (
    Family("granitemoe", from_hf, _RULES),
    Family("granitemoeshared", from_hf_shared, _RULES),
)

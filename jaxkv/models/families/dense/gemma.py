"""Gemma 1: Llama with scaled embeddings and norms whose weights are stored without their 1."""

from collections.abc import Mapping

from jaxkv.config.blocks import Multipliers
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_BLOCKS,
    attention_biases,
    llama_rules,
    read_llama_like,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.wording import shown

_ACTIVATION = "gelu_pytorch_tanh"


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "gemma"."""
    keys = ConfigJson(raw)
    if keys.take("use_bidirectional_attention", None):
        raise UnknownConfig(
            "config.json sets use_bidirectional_attention; only causal attention is supported"
        )
    # Transformers 5 reads hidden_act; older versions preferred hidden_activation.
    used = keys.take("hidden_act", _ACTIVATION)
    other = keys.take("hidden_activation", None)
    if other not in (None, used):
        raise UnknownConfig(
            f"config.json sets hidden_act = {shown(used)} and hidden_activation = {shown(other)}, which contradict "
            "each other; keep the one that the model was trained with"
        )
    return read_llama_like(
        keys,
        "gemma",
        architecture="GemmaForCausalLM",
        kv_heads=16,
        head_dim=256,
        max_positions=8192,
        activation=_ACTIVATION,
        tied=True,
        unit_offset=True,
        multipliers=Multipliers(embedding=keys.take_int("hidden_size") ** 0.5),
        **attention_biases(keys),
    )


_RULES = llama_rules(*LLAMA_BLOCKS, offset=1.0)

FAMILY = Family("gemma", from_hf, _RULES)

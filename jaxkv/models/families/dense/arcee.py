"""AFM (Arcee): Llama whose feed-forward is one squared ReLU between two linear maps."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    attention_biases,
    llama_rules,
    read_llama_like,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, attention, plain


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "arcee"."""
    keys = ConfigJson(raw)
    return read_llama_like(
        keys,
        "arcee",
        architecture="ArceeForCausalLM",
        kv_heads=None,
        max_positions=4096,
        norm_eps=1e-5,
        activation="relu2",
        mlp_bias=keys.take_bool("mlp_bias", False),
        pattern=(("attention", "plain"),) * take_num_layers(keys),
        **attention_biases(keys),
    )


FAMILY = Family(
    "arcee", from_hf, llama_rules(*attention(f"{LAYER}self_attn"), *plain(f"{LAYER}mlp"))
)

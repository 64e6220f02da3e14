"""Gemma 1: Llama with scaled embeddings and norms whose weights are stored without their 1."""

from collections.abc import Mapping

from jaxkv.config.blocks import Multipliers
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import ROTARY_TABLES, TIED, read_llama_like, take_num_layers
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, attention, embeddings, gated, norms
from jaxkv.weights.rules import RuleSet
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
    biases = keys.take_bool("attention_bias", False)
    return read_llama_like(
        keys,
        "gemma",
        architecture="GemmaForCausalLM",
        kv_heads=16,
        head_dim=256,
        max_positions=8192,
        windows=(None,) * take_num_layers(keys),
        activation=_ACTIVATION,
        tied=True,
        qkv_bias=biases,
        o_bias=biases,
        unit_offset=True,
        multipliers=Multipliers(embedding=keys.take_int("hidden_size", high=2**31 - 1) ** 0.5),
    )


_RULES = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.norm.weight", offset=1.0),
        norms(
            f"{LAYER}input_layernorm.weight",
            f"{LAYER}post_attention_layernorm.weight",
            offset=1.0,
        ),
        *attention(f"{LAYER}self_attn"),
        *gated(f"{LAYER}mlp"),
    ),
    ignored=(ROTARY_TABLES,),
    tied=TIED,
)

FAMILY = Family("gemma", from_hf, _RULES)

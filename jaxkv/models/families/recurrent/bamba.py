"""Bamba (IBM, Princeton, UIUC): Mamba-2 in most layers, attention with partial rotary embedding in the others."""

from collections.abc import Mapping, Sequence

from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    ROTARY_TABLES,
    TIED,
    attention_biases,
    read_llama_like,
    take_nullable_int,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import read_bamba_mixer
from jaxkv.weights.rule_parts import LAYER, attention, embeddings, gated, mamba2, norms
from jaxkv.weights.rules import RuleSet


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "bamba"."""
    keys = ConfigJson(raw)
    num_layers = take_num_layers(keys)
    attends = _attending(keys, num_layers)
    mixers = ("attention" if layer in attends else "mamba2" for layer in range(num_layers))
    rotated = take_nullable_int(keys, "attn_rotary_emb", None)
    config = read_llama_like(
        keys,
        "bamba",
        architecture="BambaForCausalLM",
        kv_heads=8,
        max_positions=262144,
        norm_eps=1e-5,
        partial=0.5,
        mlp_bias=keys.take_bool("mlp_bias", False),
        pattern=tuple((mixer, "gated") for mixer in mixers),
        mamba=read_bamba_mixer(keys),
        **attention_biases(keys),
    )
    if rotated not in (None, config.rope.rotary_dim):
        raise UnknownConfig(
            f"config.json sets attn_rotary_emb = {rotated}, but its other keys rotate {config.rope.rotary_dim} "
            "components of each head"
        )
    return config


def _attending(keys: ConfigJson, num_layers: int) -> set[int]:
    """Returns the numbers of the attention layers."""
    given = keys.take("attn_layer_indices", None)
    listed = [] if given is None else given
    known = range(num_layers)
    if not isinstance(listed, Sequence) or any(layer not in known for layer in listed):
        raise UnknownConfig(
            f"config.json: attn_layer_indices must name layers below {num_layers}, got {str(given)[:80]}"
        )
    return set(listed)


BAMBA_RULES = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.final_layernorm.weight"),
        norms(f"{LAYER}input_layernorm.weight", f"{LAYER}pre_ff_layernorm.weight"),
        *attention(f"{LAYER}self_attn"),
        *mamba2(f"{LAYER}mamba"),
        *gated(f"{LAYER}feed_forward"),
    ),
    # mup_vector: Falcon-H1's multipliers per channel, which are computed from the config.
    ignored=(ROTARY_TABLES, r"model\.layers\.\d+\.mamba\.mup_vector"),
    tied=TIED,
)
"""The weights of Bamba and Falcon-H1."""

FAMILY = Family("bamba", from_hf, BAMBA_RULES)

"""Granite 4 (IBM): Mamba-2 and attention layers, mostly without rotary embedding, with experts or dense MLPs."""

from collections.abc import Mapping
from functools import partial

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.dense.granite import granite_factors
from jaxkv.models.families.experts.granite_moe import GRANITE_EXPERTS
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    attention_biases,
    llama_rules,
    read_llama_like,
    take_num_layers,
    without_rotation,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import read_bamba_mixer, take_layer_kinds
from jaxkv.weights.rule_parts import LAYER, attention, layer_rule, mamba2


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "granitemoehybrid"."""
    keys = ConfigJson(raw)
    keys.take_choice("normalization_function", "rmsnorm", {"rmsnorm": "rmsnorm"})
    num_layers = take_num_layers(keys)
    mixture = _mixture(keys)
    positions = keys.take("position_embedding_type", None)
    if positions not in (None, "nope", "rope"):
        raise UnknownConfig(
            f"config.json sets position_embedding_type = {str(positions)[:80]!r}; supported are rope, nope and null"
        )
    config = read_llama_like(
        keys,
        "granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        kv_heads=None,
        max_positions=2048,
        ffn_key="shared_intermediate_size",
        pattern=_pattern(keys, num_layers, "gated" if mixture is None else "mixture+shared"),
        mamba=read_bamba_mixer(keys),
        mixture=mixture,
        **granite_factors(keys),
        **attention_biases(keys),
    )
    if positions == "rope":
        return config
    return without_rotation(config)


def _mixture(keys: ConfigJson) -> MixtureConfig | None:
    """Returns the mixture; `None` for a dense model, whose feed-forward has the keys of the shared expert."""
    experts = keys.take_int("num_local_experts", 8, low=0, high=MAX_EXPERTS)
    top_k = keys.take_int("num_experts_per_tok", 2, low=0, high=MAX_EXPERTS)
    size = keys.take_int("intermediate_size", 11008, low=0)
    if not experts:
        return None
    shared = keys.take_int("shared_intermediate_size", 1024)
    # The family's softmax over the selected experts equals a softmax over all, renormalised.
    return MixtureConfig(experts=experts, top_k=top_k, size=size, gated=True, shared_size=shared)


def _pattern(keys: ConfigJson, num_layers: int, feed_forward: str) -> tuple[tuple[str, ...], ...]:
    mamba, attention = ("mamba2", feed_forward), ("attention", feed_forward)
    kinds = keys.take("layer_types", None)
    if kinds is None:
        return (mamba,) * num_layers
    names = {"mamba": mamba, "linear_attention": mamba}
    names |= {"attention": attention, "full_attention": attention}
    return take_layer_kinds(kinds, num_layers, names)


_dense = partial(layer_rule, block="gated", prefix=f"{LAYER}shared_mlp.")
_RULES = llama_rules(
    *attention(f"{LAYER}self_attn"),
    *mamba2(f"{LAYER}mamba"),
    _dense("gate_up", "input_linear.weight"),
    _dense("down", "output_linear.weight"),
    *GRANITE_EXPERTS,
)

FAMILY = Family("granitemoehybrid", from_hf, _RULES)

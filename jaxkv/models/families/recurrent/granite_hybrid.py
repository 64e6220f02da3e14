"""Granite 4 (IBM): Mamba-2 and attention layers, mostly without rotary embedding, with experts or dense MLPs."""

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.config.blocks import MixtureConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.dense.granite import granite_factors
from jaxkv.models.families.experts.granite_moe import GRANITE_EXPERTS
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import ROTARY_TABLES, TIED, read_llama_like, take_num_layers
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import BAMBA_KEYS, read_mamba, take_layer_kinds
from jaxkv.weights.rule_parts import LAYER, LEAF, attention, embeddings, mamba2, norms
from jaxkv.weights.rules import Rule, RuleSet

_SIZE = 2**31 - 1


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "granitemoehybrid"."""
    keys = ConfigJson(raw)
    keys.take_choice("normalization_function", "rmsnorm", {"rmsnorm": "rmsnorm"})
    num_layers = take_num_layers(keys)
    hidden_size = keys.take_int("hidden_size", high=_SIZE)
    bias = keys.take_bool("mamba_proj_bias", False)
    mamba = read_mamba(
        keys,
        BAMBA_KEYS,
        d_inner=keys.take_int("mamba_expand", 2, high=2**16) * hidden_size,
        in_bias=bias,
        out_bias=bias,
    )
    mixture = _mixture(keys)
    attention_bias = keys.take_bool("attention_bias", False)
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
        windows=(None,) * num_layers,
        ffn_key="shared_intermediate_size",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        pattern=_pattern(keys, num_layers, "gated" if mixture is None else "mixture+shared"),
        mamba=mamba,
        mixture=mixture,
        **granite_factors(keys),
    )
    if positions == "rope":
        return config
    return replace(config, rope=RopeConfig(rotary_dim=config.rope.rotary_dim, kind="none"))


def _mixture(keys: ConfigJson) -> MixtureConfig | None:
    """Returns the mixture; `None` for a dense model, whose feed-forward has the keys of the shared expert."""
    experts = keys.take_int("num_local_experts", 8, low=0, high=2**16)
    top_k = keys.take_int("num_experts_per_tok", 2, low=0, high=2**16)
    size = keys.take_int("intermediate_size", 11008, low=0, high=_SIZE)
    if not experts:
        return None
    shared = keys.take_int("shared_intermediate_size", 1024, high=_SIZE)
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


_RULES = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.norm.weight"),
        norms(f"{LAYER}input_layernorm.weight", f"{LAYER}post_attention_layernorm.weight"),
        *attention(f"{LAYER}self_attn"),
        *mamba2(f"{LAYER}mamba"),
        Rule(f"{LEAF}gate_up", (f"{LAYER}shared_mlp.input_linear.weight",), block="gated"),
        Rule(f"{LEAF}down", (f"{LAYER}shared_mlp.output_linear.weight",), block="gated"),
        *GRANITE_EXPERTS,
    ),
    ignored=(ROTARY_TABLES,),
    tied=TIED,
)

FAMILY = Family("granitemoehybrid", from_hf, _RULES)

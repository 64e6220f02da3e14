"""Jamba (AI21): Mamba in most layers, attention without rotary embedding in the others, experts in some."""

from collections.abc import Mapping

from jaxkv.config.blocks import MAX_EXPERTS, Mamba1Config, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    TIED,
    read_llama_like,
    require,
    take_num_layers,
    without_rotation,
)
from jaxkv.models.families.recurrent.mamba import take_rank
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import SILU
from jaxkv.weights.rule_parts import (
    LAYER,
    attention,
    embeddings,
    gated,
    gated_experts,
    mamba1,
    norms,
)
from jaxkv.weights.rules import RuleSet


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "jamba"."""
    keys = ConfigJson(raw)
    keys.ignore("use_mamba_kernels use_mambapy use_associative_scan num_logits_to_keep")
    # Keys of the authors' own code, which the first published files have.
    keys.ignore("calc_logits_for_entire_prompt")
    require(keys, "jamba", mamba_inner_layernorms=True)
    # Mixers have the activation too.
    keys.take_choice("hidden_act", "silu", SILU)
    num_layers = take_num_layers(keys)
    hidden_size = keys.take_int("hidden_size", high=2**20)
    experts = keys.take_int("num_experts", 16, high=MAX_EXPERTS)
    attends = _every(keys, "attn_layer", num_layers, period=8, offset=4)
    mixed = _every(keys, "expert_layer", num_layers, period=2, offset=1)
    mixed = mixed if experts > 1 else set()
    top_k = keys.take_int("num_experts_per_tok", 2, high=MAX_EXPERTS)
    size = keys.take_int("intermediate_size")
    mixture = None
    if mixed:
        mixture = MixtureConfig(
            experts=experts, top_k=top_k, size=size, gated=True, renormalise=False
        )
    config = read_llama_like(
        keys,
        "jamba",
        architecture="JambaForCausalLM",
        kv_heads=8,
        max_positions=262144,
        pattern=tuple(
            (
                "attention" if layer in attends else "mamba1",
                "mixture" if layer in mixed else "gated",
            )
            for layer in range(num_layers)
        ),
        mamba1=Mamba1Config(
            channels=keys.take_int("mamba_expand", 2, high=2**16) * hidden_size,
            d_state=keys.take_int("mamba_d_state", 16, high=2**16),
            dt_rank=take_rank(keys, "mamba_dt_rank", hidden_size),
            d_conv=keys.take_int("mamba_d_conv", 4, low=2, high=64),
            conv_bias=keys.take_bool("mamba_conv_bias", True),
            bias=keys.take_bool("mamba_proj_bias", False),
            norms=True,
        ),
        mixture=mixture,
    )
    return without_rotation(config)


def _every(keys: ConfigJson, name: str, num_layers: int, *, period: int, offset: int) -> set[int]:
    """Returns the layers `offset`, `offset + period` and so on; both are Transformers' defaults."""
    period = keys.take_int(f"{name}_period", period)
    offset = keys.take_int(f"{name}_offset", offset, low=0, high=period - 1)
    return set(range(offset, num_layers, period))


_RULES = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.final_layernorm.weight"),
        norms(f"{LAYER}input_layernorm.weight", f"{LAYER}pre_ff_layernorm.weight"),
        *attention(f"{LAYER}self_attn"),
        *mamba1(f"{LAYER}mamba"),
        *gated(f"{LAYER}feed_forward"),
        *gated_experts(f"{LAYER}feed_forward", router="router.weight"),
    ),
    tied=TIED,
)

FAMILY = Family("jamba", from_hf, _RULES)

"""Nemotron-H and Nemotron 3 (NVIDIA): one block per layer: Mamba-2, attention without rotation, an MLP or experts."""

from collections.abc import Mapping
from functools import partial

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    ACTIVATIONS,
    check_architecture,
    take_dtype,
    take_nullable_int,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import MambaKeys, read_mamba, take_layer_kinds
from jaxkv.models.hf_config.special_ids import take_special_ids
from jaxkv.weights.rule_parts import (
    BACKBONE,
    attention,
    embeddings,
    layer_rule,
    mamba2,
    norms,
    plain,
)
from jaxkv.weights.rules import RuleSet

_KEYS = MambaKeys(
    heads=("mamba_num_heads", 128),
    head_dim=("mamba_head_dim", 64),
    d_state=("ssm_state_size", 128),
    d_conv=("conv_kernel", 4),
    groups=("n_groups", 8),
    chunk_size=("chunk_size", 128),
    conv_bias=("use_conv_bias", True),
    activation=("mamba_hidden_act", "silu"),
)
_STAGES = {
    "mamba": ("mamba2",),
    "attention": ("attention",),
    "mlp": ("plain",),
    "moe": ("mixture+shared",),
}
_KINDS = _STAGES | {
    "linear_attention": _STAGES["mamba"],
    "full_attention": _STAGES["attention"],
    "M": _STAGES["mamba"],
    "*": _STAGES["attention"],
    "-": _STAGES["mlp"],
    "E": _STAGES["moe"],
}
"""Kind of layer, as a name or a letter -> its stages."""


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "nemotron_h".

    Step sizes are bounded by `time_step_limit` only, in prefill and decode, as in training. Transformers also applies
    `time_step_min` as a lower bound, but in prefill only.
    """
    keys = ConfigJson(raw)
    check_architecture(keys, "nemotron_h", "NemotronHForCausalLM")
    # Implied by other keys, or not used by Transformers; the family rotates nothing.
    keys.ignore("num_hidden_layers tie_word_embeddings expand")
    keys.ignore("n_shared_experts residual_in_fp32 rope_theta partial_rotary_factor")
    vocab_size = keys.take_int("vocab_size", 131072)
    letters = keys.take("hybrid_override_pattern", None)
    named = keys.take("layers_block_type", None) or keys.take("layer_types", None) or letters
    pattern = take_layer_kinds(named, None, _KINDS)
    if keys.take("sliding_window", None) is not None:
        raise UnknownConfig(
            "config.json sets sliding_window, which is not supported for nemotron_h"
        )
    heads = keys.take_int("num_attention_heads", 32)
    head_dim_key = "head_dim" if keys.has("head_dim") else "attention_head_dim"
    head_dim = keys.take_int(head_dim_key, 128)
    bias = keys.take_bool("use_bias", False)
    config = ModelConfig(
        family="nemotron_h",
        vocab_size=vocab_size,
        hidden_size=keys.take_int("hidden_size", 4096),
        num_layers=len(pattern),
        heads=heads,
        kv_heads=take_nullable_int(keys, "num_key_value_heads", 8) or heads,
        head_dim=head_dim,
        ffn_size=keys.take_int("intermediate_size", 21504),
        max_positions=keys.take_int("max_position_embeddings", 4096),
        rope=RopeConfig(rotary_dim=head_dim - head_dim % 2, kind="none"),
        windows=(None,) * len(pattern),
        pattern=pattern,
        norm_eps=keys.take_float("layer_norm_epsilon", 1e-5),
        activation=keys.take_choice("mlp_hidden_act", "relu2", ACTIVATIONS),
        mlp_bias=keys.take_bool("mlp_bias", False),
        mamba=read_mamba(keys, _KEYS, d_inner=None, in_bias=bias, out_bias=bias, norm_groups=-1),
        mixture=_mixture(keys, used=("mixture+shared",) in pattern),
        **take_special_ids(keys, "nemotron_h", vocab_size),
        dtype=take_dtype(keys),
    )
    if config.mixture is not None and config.mlp_bias:
        raise UnknownConfig("config.json sets mlp_bias, which is not supported with experts")
    keys.finish()
    return config


def _mixture(keys: ConfigJson, *, used: bool) -> MixtureConfig | None:
    """Reads the keys of the experts, which models without experts have too; returns `None` if `used` is false."""
    sizes = {
        "experts": keys.take_int("n_routed_experts", 8, low=0, high=MAX_EXPERTS),
        "top_k": keys.take_int("num_experts_per_tok", 2, low=0, high=MAX_EXPERTS),
        "size": keys.take_int("moe_intermediate_size", 7688, low=0),
        "shared_size": keys.take_int("moe_shared_expert_intermediate_size", 7688, low=0),
        "groups": keys.take_int("n_group", 1, low=0, high=MAX_EXPERTS),
        "top_groups": keys.take_int("topk_group", 1, low=0, high=MAX_EXPERTS),
        "latent_size": take_nullable_int(keys, "moe_latent_size", None),
    }
    renormalise = keys.take_bool("norm_topk_prob", True)
    scale = keys.take_float("routed_scaling_factor", 1.0)
    if not used:
        return None
    return MixtureConfig(
        **sizes,
        gated=False,
        scoring="sigmoid",
        correction=True,
        renormalise=renormalise,
        scale=scale,
    )


_mixture_rule = partial(layer_rule, block="mixture", prefix=f"{BACKBONE}mixer.")
_shared = partial(layer_rule, block="shared", prefix=f"{BACKBONE}mixer.")
_LATENT = ("mixture.has_latent", True)

_RULES = RuleSet(
    rules=(
        *embeddings("backbone.embeddings.weight", "backbone.norm_f.weight"),
        norms(f"{BACKBONE}norm.weight"),
        *attention(f"{BACKBONE}mixer"),
        *mamba2(f"{BACKBONE}mixer"),
        *plain(f"{BACKBONE}mixer"),
        _mixture_rule("router", "gate.weight"),
        _mixture_rule("router_correction", "gate.e_score_correction_bias"),
        _mixture_rule("experts_up", "experts.{expert}.up_proj.weight", combine="stack"),
        _mixture_rule(
            "experts_down", "experts.{expert}.down_proj.weight", combine="stack_transpose"
        ),
        _mixture_rule("latent_in", "fc1_latent_proj.weight", when=_LATENT),
        _mixture_rule("latent_out", "fc2_latent_proj.weight", when=_LATENT),
        _shared("shared_up", "shared_experts.up_proj.weight"),
        _shared("shared_down", "shared_experts.down_proj.weight"),
    ),
    # Layers that predict further tokens.
    ignored=(r"mtp\..*",),
)

FAMILY = Family("nemotron_h", from_hf, _RULES)

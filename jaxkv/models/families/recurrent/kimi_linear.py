"""Kimi Linear (Kimi Team, arXiv:2510.26692): Kimi Delta Attention, latent attention without positions, and experts."""

from collections.abc import Mapping
from dataclasses import replace

from jaxkv.config.blocks import DeltaConfig
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.experts.deepseek import (
    read_latent_model,
    take_dense,
    take_mixture_v3,
)
from jaxkv.models.families.experts.mixtral import MIXTRAL_NAMES
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import llama_rules, require, take_num_layers
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import SILU, take_layer_kinds
from jaxkv.weights.rule_parts import (
    LAYER,
    gated,
    gated_experts,
    kimi_delta,
    latent_attention,
    shared_expert,
)
from jaxkv.wording import shown

_MIXERS = {"linear_attention": ("kimi_delta",), "full_attention": ("latent",)}

# The name in Kimi's files, or in those that Transformers saves -> DeepSeek-V3's name of the same fact.
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}

_LINEAR = {"full_attn_layers", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size"}
"""Keys of `linear_attn_config`."""

# What Transformers takes for keys that are not in the file, where it differs from DeepSeek-V3.
_DEFAULTS = {
    "moe_intermediate_size": 1024,
    "n_group": 1,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
}


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "kimi_linear"."""
    keys = ConfigJson({**_DEFAULTS, **_renamed(raw)})
    # Latent attention has no positions here; with one group, choosing groups first changes nothing.
    require(keys, "kimi_linear", mla_use_nope=True)
    keys.ignore("rope_interleave use_grouped_topk")
    # Convolutions have the activation too.
    keys.take_choice("hidden_act", "silu", SILU)
    linear = keys.take("linear_attn_config", None)
    if not isinstance(linear, Mapping | None):
        raise UnknownConfig(
            f"config.json: linear_attn_config must be an object, got {shown(linear)}"
        )
    linear = {key: value for key, value in (linear or {}).items() if value is not None}
    if strange := sorted(linear.keys() - _LINEAR):
        raise UnknownConfig(
            f"config.json: linear_attn_config sets {strange[0]} = {shown(linear[strange[0]])}, which is not supported"
        )
    sizes = ConfigJson(linear)
    head_dim = sizes.take_int("head_dim", keys.take_int("linear_head_dim", 128))
    heads = sizes.take_int("num_heads", keys.take_int("linear_num_heads", 32))
    width = keys.take_int("linear_conv_kernel_dim", 4, low=2, high=64)
    num_layers = take_num_layers(keys)
    kinds = take_layer_kinds(_kinds(keys, linear, num_layers), num_layers, _MIXERS)
    return read_latent_model(
        keys,
        "kimi_linear",
        architecture="KimiLinearForCausalLM",
        mixture=take_mixture_v3(keys),
        dense=take_dense(keys, 1),
        max_positions=1048576,
        pairs=False,
        mixers=tuple(kind for (kind,) in kinds),
        delta=DeltaConfig(
            key_heads=heads,
            value_heads=heads,
            key_dim=head_dim,
            value_dim=head_dim,
            d_conv=sizes.take_int("short_conv_kernel_size", width, low=2, high=64),
            gate_rank=head_dim,
        ),
    )


def _renamed(raw: Mapping[str, object]) -> dict[str, object]:
    """Returns the keys under DeepSeek-V3's names; raises `UnknownConfig` if two names of a fact contradict."""
    renamed = {key: value for key, value in raw.items() if key not in _NAMES}
    for name, known in _NAMES.items():
        value = raw.get(name)
        if value is None:
            continue
        if renamed.get(known) not in (None, value):
            raise UnknownConfig(
                f"config.json sets {name} = {shown(value)}, and another name of it, {known}, is "
                f"{shown(renamed[known])}; keep one of them"
            )
        renamed[known] = value
    return renamed


def _kinds(keys: ConfigJson, linear: Mapping[str, object], num_layers: int) -> object:
    """Returns the names of the layers' kinds; Kimi's file lists the numbers of both, from 1 on."""
    named = keys.take("layer_types", None)
    if named is not None:
        return named
    full, delta = linear.get("full_attn_layers"), linear.get("kda_layers")
    if full is None and delta is None:
        every = range(num_layers)
        return ["full_attention" if at and at % 4 == 0 else "linear_attention" for at in every]
    if not (isinstance(full, list) and isinstance(delta, list)):
        raise UnknownConfig(
            "config.json: linear_attn_config must list full_attn_layers and kda_layers, got "
            f"{shown(full)} and {shown(delta)}"
        )
    named = [number for number in (*full, *delta) if type(number) is int]
    if sorted(named) != [*range(1, num_layers + 1)] or len(named) != len(full) + len(delta):
        raise UnknownConfig(
            f"config.json: linear_attn_config must name each of the layers 1 to {num_layers} once, got "
            f"full_attn_layers = {shown(full)} and kda_layers = {shown(delta)}"
        )
    return ["full_attention" if at + 1 in full else "linear_attention" for at in range(num_layers)]


_EXPERTS = f"{LAYER}block_sparse_moe"
_RULES = llama_rules(
    *kimi_delta(f"{LAYER}self_attn"),
    *latent_attention(f"{LAYER}self_attn"),
    *gated(f"{LAYER}mlp"),
    *gated_experts(_EXPERTS, MIXTRAL_NAMES, fused=f"{LAYER}mlp"),
    *shared_expert(f"{_EXPERTS}.shared_experts"),
)

_LAYER = r"(model\.layers\.\d+\.)"
# Transformers 5 saves dense feed-forwards under the experts' name; adapters have the names of its modules.
_PREFIXES = (
    (rf"{_LAYER}block_sparse_moe\.(?=(?:gate|up|down)_proj\.)", r"\g<1>mlp."),
    (rf"{_LAYER}mlp\.(?=shared_experts\.)", r"\g<1>block_sparse_moe."),
    (rf"{_LAYER}self_attn\.forget_gate\.", r"\g<1>self_attn."),
)

FAMILY = Family("kimi_linear", from_hf, replace(_RULES, prefixes=_PREFIXES))

"""LFM2 (Liquid AI), dense and with experts: gated short convolutions, and attention in some layers."""

from collections.abc import Mapping

from jaxkv.config.blocks import MAX_EXPERTS, MixtureConfig, ShortConvConfig
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    ROTARY_TABLES,
    TIED,
    read_llama_like,
    require,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import SILU, take_layer_kinds
from jaxkv.models.hf_config.rope_json import with_theta
from jaxkv.weights.rule_parts import (
    LAYER,
    attention,
    embeddings,
    gated,
    gated_experts,
    norms,
    short_conv,
)
from jaxkv.weights.rules import RuleSet

_THETA = 1e6
_MIXERS = {"conv": ("short_conv",), "full_attention": ("attention",)}


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "lfm2"."""
    raw = {**raw, "intermediate_size": _width(ConfigJson(raw))}
    keys = ConfigJson(with_theta(raw, _THETA))
    # The width is computed from these.
    keys.ignore("block_ff_dim block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim")
    # Options of the initialisation of weights.
    keys.ignore("block_mlp_init_scale block_out_init_scale")
    keys.ignore("block_use_xavier_init conv_use_xavier_init")
    hidden_size = keys.take_int("hidden_size")
    require(
        keys,
        "lfm2",
        block_dim=hidden_size,
        conv_dim=hidden_size,
        conv_dim_out=hidden_size,
        block_norm_eps=keys.take_float("norm_eps", 1e-5),
        block_use_swiglu=True,
        use_pos_enc=True,
    )
    return _read(keys, "lfm2", "Lfm2ForCausalLM", dense=take_num_layers(keys), mixture=None)


def from_hf_moe(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "lfm2_moe"."""
    keys = ConfigJson(with_theta(raw, _THETA))
    mixture = MixtureConfig(
        experts=keys.take_int("num_experts", 32, high=MAX_EXPERTS),
        top_k=keys.take_int("num_experts_per_tok", 4, high=MAX_EXPERTS),
        size=keys.take_int("moe_intermediate_size", 1792),
        gated=True,
        scoring="sigmoid",
        correction=keys.take_bool("use_expert_bias", True),
        renormalise=keys.take_bool("norm_topk_prob", True),
        sum_eps=1e-6,
        scale=keys.take_float("routed_scaling_factor", 1.0),
    )
    dense = keys.take_int("num_dense_layers", 2, low=0)
    return _read(keys, "lfm2_moe", "Lfm2MoeForCausalLM", dense=dense, mixture=mixture)


def _width(keys: ConfigJson) -> int:
    """Returns the width of the feed-forward, which the file gives before it is cut by a third and rounded up."""
    name = "block_ff_dim" if keys.has("block_ff_dim") else "intermediate_size"
    width = keys.take_int(name, 12288)
    if not keys.take_bool("block_auto_adjust_ff_dim", True):
        return width
    factor = keys.take("block_ffn_dim_multiplier", 1.0)
    width = int(2 * width / 3)
    if factor is None:
        return width
    multiple = keys.take_int("block_multiple_of", 256)
    width = int(keys.take_float("block_ffn_dim_multiplier", 1.0) * width)
    return -(-width // multiple) * multiple


def _read(
    keys: ConfigJson, family: str, architecture: str, *, dense: int, mixture: MixtureConfig | None
) -> ModelConfig:
    """Reads the keys that both families share; the first `dense` layers have no experts."""
    # Transformers ignores the key and has this activation only.
    keys.take_choice("hidden_act", "silu", SILU)
    num_layers = take_num_layers(keys)
    kinds = keys.take("layer_types", None)
    attending = keys.take("full_attn_idxs", None)
    if kinds is None:
        every = range(num_layers)
        listed = attending if isinstance(attending, list) else list(every)
        kinds = ["full_attention" if layer in listed else "conv" for layer in every]
    mixers = take_layer_kinds(kinds, num_layers, _MIXERS)
    tied = keys.take_bool("tie_embedding", True)
    if keys.has("tie_embedding") and keys.take("tie_word_embeddings", tied) not in (tied, None):
        raise UnknownConfig(
            f"config.json sets tie_embedding = {tied}, which contradicts tie_word_embeddings; keep one of them"
        )
    return read_llama_like(
        keys,
        family,
        architecture=architecture,
        kv_heads=8,
        max_positions=128000,
        norm_key="norm_eps",
        norm_eps=1e-5,
        tied=tied,
        qk_norm=True,
        pattern=tuple(
            (*mixer, "gated" if layer < dense else "mixture") for layer, mixer in enumerate(mixers)
        ),
        short_conv=ShortConvConfig(
            channels=keys.take_int("hidden_size"),
            d_conv=keys.take_int("conv_L_cache", 3, low=2, high=64),
            bias=keys.take_bool("conv_bias", False),
        ),
        mixture=mixture,
    )


_NAMES = ("w1", "w3", "w2")
_RULES = RuleSet(
    rules=(
        *embeddings("model.embed_tokens.weight", "model.embedding_norm.weight"),
        norms(f"{LAYER}operator_norm.weight", f"{LAYER}ffn_norm.weight"),
        *attention(f"{LAYER}self_attn", norm="layernorm", out="out_proj"),
        *short_conv(f"{LAYER}conv"),
        *gated(f"{LAYER}feed_forward", _NAMES),
        *gated_experts(f"{LAYER}feed_forward", _NAMES, correction="expert_bias"),
    ),
    ignored=(ROTARY_TABLES,),
    tied=TIED,
)

FAMILIES = (
    Family("lfm2", from_hf, _RULES),
    Family("lfm2_moe", from_hf_moe, _RULES),
)

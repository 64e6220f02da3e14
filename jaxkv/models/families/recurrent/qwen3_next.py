"""Qwen3-Next: gated delta mixers, gated attention in every fourth layer, many small experts and a shared one."""

from collections.abc import Mapping, Sequence

from jaxkv.config.blocks import DeltaConfig, MixtureConfig
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.experts.qwen3_moe import qwen_feed_forwards, take_qwen_mixture
from jaxkv.models.families.family import Family, MtpNames
from jaxkv.models.families.llama_like import llama_rules, read_llama_like, take_num_layers
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.mamba_json import SILU, take_layer_kinds
from jaxkv.weights.rule_parts import (
    LAYER,
    delta,
    gated,
    gated_attention,
    gated_experts,
    gated_shared_expert,
)
from jaxkv.weights.rules import Rule, RuleSet

_MIXERS = {"linear_attention": ("delta",), "full_attention": ("attention",)}


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "qwen3_next"."""
    keys = ConfigJson(raw)
    return read_qwen_delta(
        keys,
        "qwen3_next",
        architecture="Qwen3NextForCausalLM",
        kv_heads=2,
        feed_forwards=qwen_feed_forwards(keys, take_num_layers(keys), "mixture+shared"),
        mixture=take_qwen_mixture(
            keys,
            experts=512,
            top_k=10,
            size=512,
            shared_size=512,
            renormalise=keys.take_bool("norm_topk_prob", True),
        ),
    )


def read_qwen_delta(
    keys: ConfigJson,
    family: str,
    *,
    architecture: str | tuple[str, ...],
    kv_heads: int,
    feed_forwards: Sequence[str],
    mixture: MixtureConfig | None,
    ffn_key: str = "intermediate_size",
) -> ModelConfig:
    """Reads the keys of Qwen's models with gated delta mixers, and returns the model's config.

    Args:
        keys: config.json, from which the family has read its own keys.
        family: its `model_type`.
        architecture: name of its causal language model in `architectures`.
        kv_heads: Transformers' default.
        feed_forwards: the feed-forward stage of each layer.
        mixture: sizes of the experts.
        ffn_key: key of the dense feed-forward's width.

    Raises:
        UnknownConfig: a key that would change the result was not read, or has an unsupported value.
        ValueError: a value is missing, of the wrong type or out of range.
    """
    if keys.take_bool("attention_bias", False):
        raise UnknownConfig(
            "config.json sets attention_bias, which is not supported with gated attention"
        )
    # Convolutions have the activation too.
    keys.take_choice("hidden_act", "silu", SILU)
    num_layers = take_num_layers(keys)
    interval = keys.take_int("full_attention_interval", 4)
    kinds = keys.take("layer_types", None)
    if kinds is None:
        every = range(1, num_layers + 1)
        kinds = ["linear_attention" if layer % interval else "full_attention" for layer in every]
    mixers = take_layer_kinds(kinds, num_layers, _MIXERS)
    return read_llama_like(
        keys,
        family,
        architecture=architecture,
        kv_heads=kv_heads,
        max_positions=32768,
        head_dim=256,
        partial=0.25,
        ffn_key=ffn_key,
        qk_norm=True,
        attention_gate=True,
        unit_offset=True,
        pattern=tuple(
            (*mixer, feed_forward)
            for mixer, feed_forward in zip(mixers, feed_forwards, strict=True)
        ),
        delta=DeltaConfig(
            key_heads=keys.take_int("linear_num_key_heads", 16),
            value_heads=keys.take_int("linear_num_value_heads", 32),
            key_dim=keys.take_int("linear_key_head_dim", 128),
            value_dim=keys.take_int("linear_value_head_dim", 128),
            d_conv=keys.take_int("linear_conv_kernel_dim", 4, low=2, high=64),
        ),
        mixture=mixture,
    )


def qwen_delta_rules(mixer: tuple[Rule, ...]) -> RuleSet:
    """Returns the weight rules of Qwen's models with gated delta mixers, given those of the mixer."""
    return llama_rules(
        *gated_attention(f"{LAYER}self_attn", offset=1.0),
        *mixer,
        *gated(f"{LAYER}mlp"),
        *gated_experts(f"{LAYER}mlp"),
        *gated_shared_expert(f"{LAYER}mlp"),
        offset=1.0,
        # Layers that predict further tokens.
        ignored=(r"mtp\..*",),
    )


QWEN_MTP = MtpNames(
    prefix="mtp.",
    block="mtp.layers.0.",
    embedding_norm="pre_fc_norm_embedding.weight",
    hidden_norm="pre_fc_norm_hidden.weight",
    join="fc.weight",
    final_norm="norm.weight",
    ignored=(r"layers\.[1-9]\d*\..*", r"(embed_tokens|lm_head)\.weight"),
)
"""Names of the layer that predicts further tokens, of full attention even if others have none."""

_RULES = qwen_delta_rules(delta(f"{LAYER}linear_attn"))

FAMILY = Family("qwen3_next", from_hf, _RULES, QWEN_MTP)

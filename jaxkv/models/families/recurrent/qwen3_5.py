"""Qwen3.5 and 3.6, models of text: gated delta mixers as in Qwen3-Next; all layers dense, or all with experts."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.models.families.experts.qwen3_moe import take_qwen_mixture
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import require, take_num_layers
from jaxkv.models.families.recurrent.qwen3_next import (
    QWEN_MTP,
    qwen_delta_rules,
    read_qwen_delta,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, split_delta


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "qwen3_5_text"."""
    keys = _keys(raw, "qwen3_5_text")
    return read_qwen_delta(
        keys,
        "qwen3_5_text",
        architecture=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        kv_heads=4,
        feed_forwards=["gated"] * take_num_layers(keys),
        mixture=None,
    )


def from_hf_moe(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "qwen3_5_moe_text"."""
    # Transformers has no dense feed-forward in this family and ignores its width.
    keys = _keys({"moe_intermediate_size": 512, **raw}, "qwen3_5_moe_text")
    keys.ignore("intermediate_size")
    return read_qwen_delta(
        keys,
        "qwen3_5_moe_text",
        # The last one stands in pruned models, whose other keys are those of experts.
        architecture=(
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
        ),
        kv_heads=2,
        feed_forwards=["mixture+shared"] * take_num_layers(keys),
        mixture=take_qwen_mixture(
            keys, experts=256, top_k=8, size=512, shared_size=512, renormalise=True
        ),
        ffn_key="moe_intermediate_size",
    )


def _keys(raw: Mapping[str, object], family: str) -> ConfigJson:
    """Returns the keys; raises `UnknownConfig` for values that Transformers ignores and that would matter."""
    keys = ConfigJson(raw)
    require(
        keys,
        family,
        attn_output_gate=True,
        output_gate_type="swish",
        mlp_only_layers=[],
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )
    return keys


_RULES = qwen_delta_rules(split_delta(f"{LAYER}linear_attn"))

TEXT = Family("qwen3_5_text", from_hf, _RULES, QWEN_MTP)
EXPERTS = Family("qwen3_5_moe_text", from_hf_moe, _RULES, QWEN_MTP)

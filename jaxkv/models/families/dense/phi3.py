"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, and LongRoPE in the models with a long context."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    llama_rules,
    read_llama_like,
    take_nullable_int,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.rule_parts import LAYER, fused_gated, layer_rule
from jaxkv.wording import shown

_POSITIONS = 4096


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "phi3"."""
    keys = ConfigJson(_with_rope(raw))
    # Keys of Microsoft's own code, which Transformers does not read.
    for name, neutral in (("full_attn_mod", 1), ("interpolate_factor", 1), ("lm_head_bias", False)):
        if keys.take(name, neutral) != neutral:
            raise UnknownConfig(
                f"config.json sets {name} = {shown(keys.take(name))}; for phi3, only {neutral} is supported"
            )
    keys.ignore("original_max_position_embeddings")
    positions = keys.take_int("max_position_embeddings", _POSITIONS)
    window = take_nullable_int(keys, "sliding_window", None)
    # Published models with a long context have a window that is longer than it.
    window = window if window is not None and window < positions else None
    return read_llama_like(
        keys,
        "phi3",
        architecture="Phi3ForCausalLM",
        kv_heads=None,
        max_positions=_POSITIONS,
        norm_eps=1e-5,
        partial=1.0,
        windows=(window,) * take_num_layers(keys),
    )


def _with_rope(raw: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the keys with LongRoPE's part complete: its old names replaced, the original context's length added."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    part = raw.get(name)
    if not isinstance(part, Mapping):
        return raw
    kind = part.get("rope_type", part.get("type"))
    if kind not in ("su", "yarn", "longrope"):
        return raw
    length = raw.get("original_max_position_embeddings", _POSITIONS)
    named = {key: value for key, value in part.items() if key != "type"}
    return {
        **raw,
        name: {**named, "rope_type": "longrope", "original_max_position_embeddings": length},
    }


_RULES = llama_rules(
    layer_rule("qkv", f"{LAYER}self_attn.qkv_proj.weight", block="attention"),
    layer_rule("o", f"{LAYER}self_attn.o_proj.weight", block="attention"),
    *fused_gated(f"{LAYER}mlp"),
)

FAMILY = Family("phi3", from_hf, _RULES)

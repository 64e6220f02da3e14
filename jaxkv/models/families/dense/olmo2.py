"""OLMo-2 and OLMo-3 (Ai2): norms only after the stages, and norms over all heads of queries and of keys together."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_BLOCKS,
    Differences,
    attention_biases,
    layer_windows,
    llama_rules,
    read_llama_like,
    take_head_dim,
    take_nullable_int,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import read_ropes
from jaxkv.weights.rule_parts import LAYER, post_norms

_POSITIONS = 2048
_THETA = 500000.0


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "olmo2"."""
    keys = ConfigJson(raw)
    return read_llama_like(
        keys,
        "olmo2",
        architecture="Olmo2ForCausalLM",
        kv_heads=None,
        max_positions=_POSITIONS,
        norm_eps=1e-5,
        **_differences(keys),
    )


def olmo3_from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "olmo3": windows, with a rotary embedding of their own."""
    keys = ConfigJson(raw)
    theta = keys.take_float("rope_theta", _THETA)
    if theta != _THETA and not keys.take_object("rope_parameters"):
        raise UnknownConfig(
            f"config.json sets rope_theta = {theta}, which Transformers 4 applies to all layers and Transformers 5 to "
            "those without a window; give both in rope_parameters"
        )
    full, windowed = read_ropes(
        keys,
        head_dim=take_head_dim(keys),
        max_positions=keys.take_int("max_position_embeddings", _POSITIONS),
        theta=theta,
        window_theta=_THETA,
    )
    window = take_nullable_int(keys, "sliding_window", 4096)
    differences = _differences(keys)
    differences["window_rope"] = windowed
    return read_llama_like(
        keys,
        "olmo3",
        architecture="Olmo3ForCausalLM",
        kv_heads=None,
        max_positions=_POSITIONS,
        norm_eps=1e-5,
        windows=layer_windows(keys, window, full_every=4),
        rope=full,
        **differences,
    )


def _differences(keys: ConfigJson) -> Differences:
    return {
        **attention_biases(keys),
        "pre_norms": False,
        "post_norms": True,
        "wide_norms": True,
        "wide_qk_norm": True,
    }


RULES = llama_rules(
    post_norms(
        f"{LAYER}post_attention_layernorm.weight", f"{LAYER}post_feedforward_layernorm.weight"
    ),
    *LLAMA_BLOCKS,
    norm_names=(),
)
"""The weights of OLMo-2, which OLMo-3 and Exaone 4 have under the same names."""

FAMILIES = (
    Family("olmo2", from_hf, RULES),
    Family("olmo3", olmo3_from_hf, RULES),
)

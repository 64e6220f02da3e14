"""Gemma 3, text models: a window and its own rotary embedding in five of six layers, norms on queries and keys."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.dense.gemma2 import GEMMA_RULES, gemma, take_window
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import layer_windows, read_llama_like, take_nullable_float
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import read_ropes

_POSITIONS = 131072


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "gemma3_text"."""
    keys = ConfigJson(raw)
    if keys.take("attn_logit_softcapping", None) is not None:
        raise UnknownConfig(
            "config.json sets attn_logit_softcapping, which Transformers does not apply in this family; set it to "
            "null if the model was trained without it"
        )
    every = keys.take_int("sliding_window_pattern", 6)
    full, windowed = read_ropes(
        keys,
        head_dim=keys.take_int("head_dim", 256, high=2**16),
        max_positions=keys.take_int("max_position_embeddings", _POSITIONS),
        theta=keys.take_float("rope_theta", 1e6),
        window_theta=keys.take_float("rope_local_base_freq", 1e4),
    )
    return read_llama_like(
        keys,
        "gemma3_text",
        architecture="Gemma3ForCausalLM",
        kv_heads=4,
        head_dim=256,
        max_positions=_POSITIONS,
        windows=layer_windows(keys, take_window(keys), full_every=every),
        rope=full,
        window_rope=windowed,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
        qk_norm=True,
        logit_cap=take_nullable_float(keys, "final_logit_softcapping", None),
        **gemma(keys),
    )


FAMILY = Family("gemma3_text", from_hf, GEMMA_RULES)

"""Mistral: Llama with a window in every layer, or none; Ministral 3 has queries that grow with their position."""

from collections.abc import Mapping

from jaxkv.config.blocks import QueryGrowth
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_RULES,
    equal_windows,
    read_llama_like,
    take_nullable_int,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.wording import shown


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "mistral"."""
    keys = ConfigJson(raw)
    window = take_nullable_int(keys, "sliding_window", 4096)
    return read_llama_like(
        keys,
        "mistral",
        architecture="MistralForCausalLM",
        kv_heads=8,
        max_positions=4096 * 32,
        windows=equal_windows(keys, window, "mistral"),
    )


# What Transformers takes if the file has no rotary keys.
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral_from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "ministral3" (Ministral 3, Devstral 2 and others)."""
    keys, growth = take_query_growth(raw, _MINISTRAL_ROPE)
    window = take_nullable_int(keys, "sliding_window", None)
    return read_llama_like(
        keys,
        "ministral3",
        architecture="Ministral3ForCausalLM",
        kv_heads=8,
        head_dim=128,
        max_positions=262144,
        norm_eps=1e-5,
        windows=equal_windows(keys, window, "ministral3"),
        query_growth=growth,
    )


def take_query_growth(
    raw: Mapping[str, object], default: Mapping[str, object], *, share: float = 1.0
) -> tuple[ConfigJson, QueryGrowth]:
    """Returns a config.json without the keys of its rotary part about the growth of queries, and that growth.

    Args:
        raw: the parsed config.json.
        default: the rotary part of a file that has none.
        share: the rotated share of a head, which the rotary part may repeat.

    Raises:
        UnknownConfig: the rotary part has another share.
        ValueError: a value is missing, of the wrong type or out of range.
    """
    outer = ConfigJson(raw)
    name = "rope_scaling" if outer.take_object("rope_scaling") else "rope_parameters"
    rotary = {**(outer.take_object(name) or default)}
    keys = ConfigJson(rotary, place=f"config.json: {name}")
    growth = QueryGrowth(
        beta=keys.take_float("llama_4_scaling_beta"),
        length=keys.take_int("original_max_position_embeddings"),
    )
    repeated = keys.take("partial_rotary_factor", None)
    if repeated not in (None, share):
        raise UnknownConfig(
            f"config.json: {name} sets partial_rotary_factor = {shown(repeated)}, but the sizes of heads rotate "
            f"{share} of each"
        )
    # Transformers repeats the model's length here and does not read it.
    known = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
    left = {key: value for key, value in rotary.items() if key not in known}
    return ConfigJson({**raw, name: left}), growth


FAMILIES = (
    Family("mistral", from_hf, LLAMA_RULES),
    Family("ministral3", ministral_from_hf, LLAMA_RULES),
)

"""Exaone 4 (LG AI): norms after the stages, norms on queries and keys, and rotary embedding only in window layers."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.dense.olmo2 import RULES
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    layer_windows,
    read_llama_like,
    require,
    take_nullable_int,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.wording import shown


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "exaone4"."""
    keys = ConfigJson(raw)
    # Published files have them, and Transformers reads neither: its norms are always behind the stages.
    keys.ignore("max_window_layers")
    require(keys, "exaone4", reorder_qk_norm=True)
    window = take_nullable_int(keys, "sliding_window", 4096)
    windows = layer_windows(keys, window, full_every=_full_every(keys))
    # Without windows all layers are rotated.
    full = () if window is None else enumerate(windows)
    return read_llama_like(
        keys,
        "exaone4",
        architecture="Exaone4ForCausalLM",
        kv_heads=32,
        max_positions=2048,
        norm_eps=1e-5,
        windows=windows,
        nope_layers=tuple(layer for layer, reach in full if reach is None),
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
    )


def _full_every(keys: ConfigJson) -> int | None:
    """Returns every how many layers one has no window; `layer_types`, which takes precedence, may replace the key."""
    if keys.take("layer_types", None) is None and keys.take("sliding_window", 4096) is not None:
        every = keys.take("sliding_window_pattern", 4)
        if isinstance(every, str):
            raise UnknownConfig(
                f"config.json sets sliding_window_pattern = {shown(every)} and no layer_types; Transformers computes "
                "layers from a number only: name the kind of each layer in layer_types, as published files do"
            )
        return keys.take_int("sliding_window_pattern", 4)
    # Published files repeat the pattern as text, such as "LLLG".
    keys.ignore("sliding_window_pattern")
    return None


FAMILY = Family("exaone4", from_hf, RULES)

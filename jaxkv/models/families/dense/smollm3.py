"""SmolLM3: Llama without rotary embedding in every fourth layer, and optionally with windows in these layers."""

from collections.abc import Mapping

from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    LLAMA_RULES,
    attention_biases,
    layer_windows,
    read_llama_like,
    take_nullable_int,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import with_theta
from jaxkv.wording import shown

_THETA = 2e6


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "smollm3"."""
    keys = ConfigJson(with_theta(raw, _THETA))
    # Transformers does not read it.
    keys.ignore("max_window_layers")
    unrotated = _nope_layers(keys)
    return read_llama_like(
        keys,
        "smollm3",
        architecture="SmolLM3ForCausalLM",
        kv_heads=4,
        max_positions=32768,
        tied=True,
        windows=_windows(keys, unrotated),
        nope_layers=unrotated,
        mlp_bias=keys.take_bool("mlp_bias", False),
        **attention_biases(keys),
    )


def _nope_layers(keys: ConfigJson) -> tuple[int, ...]:
    """Returns the layers without rotary embedding: those with 0 in `no_rope_layers`, or every n-th."""
    num_layers = take_num_layers(keys)
    every = keys.take_int("no_rope_layer_interval", 4)
    rotated = keys.take("no_rope_layers", None)
    if rotated is None:
        return tuple(layer for layer in range(num_layers) if (layer + 1) % every == 0)
    flags = [flag for flag in rotated if flag in (0, 1)] if isinstance(rotated, list) else []
    if flags != rotated or len(flags) != num_layers:
        raise UnknownConfig(
            f"config.json: no_rope_layers must hold 0 or 1 for each of the {num_layers} layers, got {shown(rotated)}"
        )
    return tuple(layer for layer, flag in enumerate(flags) if not flag)


def _windows(keys: ConfigJson, unrotated: tuple[int, ...]) -> tuple[int | None, ...]:
    """Returns the window of each layer; without `layer_types`, layers without rotary embedding have one."""
    used = keys.take_bool("use_sliding_window", False)
    window = take_nullable_int(keys, "sliding_window", None)
    window = window if used else None
    if keys.take("layer_types", None) is not None:
        return layer_windows(keys, window)
    layers = range(take_num_layers(keys))
    return tuple(window if layer in unrotated else None for layer in layers)


FAMILY = Family("smollm3", from_hf, LLAMA_RULES)

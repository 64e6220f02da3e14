"""Cohere (Command R, Aya) and Cohere 2 (Command R7B, Command A): attention and feed-forward in parallel, LayerNorms."""

from collections.abc import Mapping

from jaxkv.config.blocks import Multipliers
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.families.family import Family
from jaxkv.models.families.llama_like import (
    attention_biases,
    layer_windows,
    llama_rules,
    read_llama_like,
    require,
    take_num_layers,
)
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.rope_json import with_theta
from jaxkv.weights.rule_parts import LAYER, attention, gated

_THETA = 500000.0


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "cohere2": only window layers have rotary embedding."""
    keys = ConfigJson(raw)
    # Transformers writes it and does not read it.
    keys.ignore("_sliding_window_pattern use_parallel_embedding")
    every = keys.take_int("sliding_window_pattern", 4)
    # Keys of the authors' own code, which published files repeat.
    require(
        keys,
        "cohere2",
        layer_switch=every,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        use_embedding_sharing=keys.take_bool("tie_word_embeddings", True),
        use_gated_activation=True,
        use_parallel_block=True,
        use_qk_norm=False,
    )
    window = keys.take_int("sliding_window", 4096)
    windows = layer_windows(keys, window, full_every=every)
    full = tuple(layer for layer, reach in enumerate(windows) if reach is None)
    return _read(keys, "cohere2", "Cohere2ForCausalLM", windows, full)


def older_from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed config.json whose `model_type` is "cohere" (Command R, Aya)."""
    keys = ConfigJson(with_theta(raw, _THETA))
    if keys.take("use_qk_norm", None):
        raise UnknownConfig(
            "config.json sets use_qk_norm = True, as Command R+ does; for cohere, only false is supported: take a "
            "model without these norms, such as Command R"
        )
    return _read(keys, "cohere", "CohereForCausalLM", (None,) * take_num_layers(keys), ())


def _read(
    keys: ConfigJson,
    family: str,
    architecture: str,
    windows: tuple[int | None, ...],
    nope_layers: tuple[int, ...],
) -> ModelConfig:
    return read_llama_like(
        keys,
        family,
        architecture=architecture,
        kv_heads=None,
        max_positions=8192,
        norm_key="layer_norm_eps",
        norm_eps=1e-5,
        tied=True,
        windows=windows,
        nope_layers=nope_layers,
        pattern=(("attention+gated",),) * take_num_layers(keys),
        layer_norms=True,
        wide_norms=True,
        multipliers=Multipliers(logits=keys.take_float("logit_scale", 0.0625)),
        **attention_biases(keys),
    )


_RULES = llama_rules(
    *attention(f"{LAYER}self_attn", interleaved=True),
    *gated(f"{LAYER}mlp"),
    norm_names=("input_layernorm",),
)

FAMILIES = (
    Family("cohere", older_from_hf, _RULES),
    Family("cohere2", from_hf, _RULES),
)

"""Token ids that begin and end a text: of config.json, or those that Transformers' class fills in for missing keys."""

from collections.abc import Mapping
from typing import NamedTuple, TypedDict

from jaxkv.models.hf_config.config_json import ConfigJson


class SpecialIds(TypedDict):
    """The fields of `ModelConfig` for these ids."""

    eos_ids: tuple[int, ...]
    bos_id: int | None
    assumed_eos: bool


class Defaults(NamedTuple):
    """What a class has for keys that a file does not have; null in a file stays null."""

    bos: int | None
    eos: int | tuple[int, ...] | None


_NONE = Defaults(None, None)
_LLAMA = Defaults(1, 2)
_COHERE = Defaults(5, 255001)
_GEMMA = Defaults(2, 1)
_GLM = Defaults(None, (151329, 151336, 151338))
_OLMO = Defaults(None, 50279)
_DEEPSEEK = Defaults(0, 1)

DEFAULTS: Mapping[str, Defaults] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _NONE,
    "qwen3": _NONE,
    "granite": _LLAMA,
    "phi3": Defaults(1, 32000),
    "smollm3": Defaults(128000, 128001),
    "seed_oss": Defaults(0, 2),
    "hunyuan_v1_dense": _LLAMA,
    "glm": _GLM,
    "glm4": _GLM,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "exaone4": Defaults(0, 2),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt_oss": _NONE,
    "mixtral": _LLAMA,
    "qwen3_moe": _NONE,
    "granitemoe": _LLAMA,
    "granitemoeshared": _LLAMA,
    "glm4_moe": _NONE,
    "mamba": Defaults(0, 0),
    "mamba2": Defaults(0, 2),
    "bamba": _LLAMA,
    "granitemoehybrid": _LLAMA,
    "nemotron_h": _LLAMA,
    "falcon_h1": _LLAMA,
    "qwen3_next": _NONE,
    "qwen3_5_text": _NONE,
    "qwen3_5_moe_text": _NONE,
    "jamba": _LLAMA,
    "zamba2": _LLAMA,
    "lfm2": _LLAMA,
    "lfm2_moe": _LLAMA,
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _DEEPSEEK,
    # Transformers has no class of this name; the model is DeepSeek-V3.
    "kimi_k2": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
}
"""`model_type` -> defaults of its config class, the same in Transformers 4.45 to 5.17. A multimodal model has those of
its text part."""


def take_special_ids(keys: ConfigJson, family: str, vocab_size: int) -> SpecialIds:
    """Reads `eos_token_id` and `bos_token_id`.

    Args:
        keys: config.json.
        family: its `model_type`, or that of its text part.
        vocab_size: ids from this one on are left out, see `ConfigJson.take_ids`.

    Raises:
        ValueError: a value is no id, list of ids or null.
    """
    defaults = DEFAULTS[family]
    return {
        "eos_ids": keys.take_ids("eos_token_id", vocab_size, defaults.eos),
        "bos_id": next(iter(keys.take_ids("bos_token_id", vocab_size, defaults.bos)), None),
        "assumed_eos": keys.lacks("eos_token_id"),
    }

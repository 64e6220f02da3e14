"""Token ids that end a text: of config.json, or those that Transformers' class fills in for a missing key."""

from collections.abc import Mapping
from typing import TypedDict

from jaxkv.models.hf_config.config_json import ConfigJson


class SpecialIds(TypedDict):
    """The fields of `ModelConfig` for these ids."""

    eos_ids: tuple[int, ...]
    assumed_eos: bool


_LLAMA = 2
_COHERE = 255001
_GEMMA = 1
_GLM = (151329, 151336, 151338)
_OLMO = 50279
_DEEPSEEK = 1

DEFAULTS: Mapping[str, int | tuple[int, ...] | None] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral3": _LLAMA,
    "mistral4": _LLAMA,
    "qwen2": None,
    "qwen3": None,
    "qwen3_vl_text": None,
    "granite": _LLAMA,
    "phi3": 32000,
    "smollm3": 128001,
    "seed_oss": 2,
    "hunyuan_v1_dense": _LLAMA,
    "arcee": 128001,
    "ernie4_5": _LLAMA,
    "ernie4_5_moe": _LLAMA,
    "glm": _GLM,
    "glm4": _GLM,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "exaone4": 2,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": _GEMMA,
    "gpt_oss": None,
    "mixtral": _LLAMA,
    "minimax_m2": 200020,
    "olmoe": _OLMO,
    "qwen2_moe": None,
    "qwen3_moe": None,
    "qwen3_vl_moe_text": None,
    "granitemoe": _LLAMA,
    "granitemoeshared": _LLAMA,
    "glm4_moe": None,
    "mamba": 0,
    "mamba2": 2,
    "bamba": _LLAMA,
    "granitemoehybrid": _LLAMA,
    "nemotron_h": _LLAMA,
    "falcon_h1": _LLAMA,
    "qwen3_next": None,
    "qwen3_5_text": None,
    "qwen3_5_moe_text": None,
    "jamba": _LLAMA,
    "zamba2": _LLAMA,
    "lfm2": _LLAMA,
    "lfm2_moe": _LLAMA,
    "deepseek_v2": _LLAMA,
    "deepseek_v3": _DEEPSEEK,
    # Transformers has no class of this name; the model is DeepSeek-V3.
    "kimi_k2": _DEEPSEEK,
    "kimi_linear": 163586,
    "deepseek_v32": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
}
"""`model_type` -> default of its config class for `eos_token_id`, the same in Transformers 4.45 to 5.17. A multimodal
model has that of its text part."""


def take_special_ids(keys: ConfigJson, family: str, vocab_size: int) -> SpecialIds:
    """Reads `eos_token_id`, and checks `bos_token_id`, which no program reads.

    Args:
        keys: config.json.
        family: its `model_type`, or that of its text part.
        vocab_size: ids from this one on are left out, see `ConfigJson.take_ids`.

    Raises:
        ValueError: a value is no id, list of ids or null.
    """
    keys.take_ids("bos_token_id", vocab_size)
    return {
        "eos_ids": keys.take_ids("eos_token_id", vocab_size, DEFAULTS[family]),
        "assumed_eos": keys.lacks("eos_token_id"),
    }

"""Finds the family of a model directory by its `model_type`. Looks up no name it was not written with."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from jaxkv.errors import UnknownConfig
from jaxkv.model_config import ModelConfig
from jaxkv.models import (
    bamba,
    deepseek,
    falcon_h1,
    gemma2,
    gemma3,
    gpt_oss,
    granite_hybrid,
    llama,
    mamba2,
    mistral,
    nemotron_h,
    qwen2,
    qwen3,
    qwen3_next,
)
from jaxkv.models.config_json import ConfigJson
from jaxkv.models.decoder import Decoder
from jaxkv.weights.directory import existing_directory, read_json, read_json_if_there

FAMILIES: Mapping[str, Callable[[Mapping[str, object]], ModelConfig]] = {
    "llama": llama.from_hf,
    "mistral": mistral.from_hf,
    "qwen2": qwen2.from_hf,
    "qwen3": qwen3.from_hf,
    "gemma2": gemma2.from_hf,
    "gemma3_text": gemma3.from_hf,
    "gpt_oss": gpt_oss.from_hf,
    "mamba2": mamba2.from_hf,
    "bamba": bamba.from_hf,
    "granitemoehybrid": granite_hybrid.from_hf,
    "nemotron_h": nemotron_h.from_hf,
    "falcon_h1": falcon_h1.from_hf,
    "qwen3_next": qwen3_next.from_hf,
    "deepseek_v2": deepseek.from_hf_v2,
    "deepseek_v3": deepseek.from_hf_v3,
    "deepseek_v32": deepseek.from_hf_v32,
}


def load_config(directory: str | Path) -> ModelConfig:
    """Reads `config.json`, and the end ids of `generation_config.json` where there is one.

    Raises:
        BadCheckpoint: a file is missing or is no JSON object.
        UnknownConfig: the family, or a key that would change the result, is not understood.
        ValueError: a value has the wrong type or is out of range.
    """
    path = existing_directory(directory)
    config = read_config(read_json(path, "config.json"))
    generation = ConfigJson(
        read_json_if_there(path, "generation_config.json"), place="generation_config.json"
    )
    eos_ids = generation.take_ids("eos_token_id", config.vocab_size)
    return replace(config, eos_ids=eos_ids) if eos_ids else config


def read_config(raw: Mapping[str, object]) -> ModelConfig:
    """Reads a parsed `config.json`; raises as `load_config` does."""
    # Keys that ask for code are refused before anything else is said about the file.
    model_type = ConfigJson(raw).take("model_type", None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnknownConfig(
            f"config.json: model_type {str(model_type)[:80]!r} is not supported; "
            f"supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type](raw)


def build_model(config: ModelConfig, *, implementation: str | None = None) -> Decoder:
    """Returns the computation a config describes; `implementation` is of the ops, for the whole model."""
    return Decoder(config, implementation)

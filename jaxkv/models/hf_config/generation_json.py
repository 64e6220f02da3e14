"""Reads the recommended sampling parameters of a model from `generation_config.json`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from jaxkv.config.sampling import SamplingParams
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.weights.directory import existing_directory, read_json_if_there

FILE = "generation_config.json"


def load_sampling_defaults(directory: str | Path) -> Mapping[str, float]:
    """Returns the sampling that a model directory recommends, as fields of `SamplingParams`.

    These are temperature, top_p, top_k, min_p and repetition_penalty.

    `do_sample: false` is temperature 0, and `do_sample: true` without a temperature is temperature 1. Other keys are
    ignored.

    Args:
        directory: a Hugging Face model directory.

    Returns:
        The fields that the file sets; none if there is no file.

    Raises:
        BadCheckpoint: the file is no JSON object.
        ValueError: a value has the wrong type or is out of range.
    """
    generation = ConfigJson(read_json_if_there(existing_directory(directory), FILE), place=FILE)
    found: dict[str, float] = {
        name: generation.take_float(name)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
        if generation.take(name, None) is not None
    }
    if generation.take("top_k", None) is not None:
        found["top_k"] = generation.take_int("top_k", low=-1)
    if generation.take("do_sample", None) is not None:
        sampled = generation.take_bool("do_sample")
        found["temperature"] = found.get("temperature", 1.0) if sampled else 0.0
    try:
        replace(SamplingParams(), **found)
    except ValueError as error:
        raise ValueError(f"{FILE}: {error}") from None
    return found

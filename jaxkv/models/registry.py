"""The built-in families by `model_type`; reads config, model and parameters of a model directory."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Sharding
from jaxtyping import PyTree

from jaxkv.config.checks import dtype_name
from jaxkv.config.model import ModelConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.families import multimodal
from jaxkv.models.families.dense import (
    arcee,
    cohere2,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    granite,
    hunyuan,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
)
from jaxkv.models.families.experts import (
    deepseek,
    ernie4_5,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite_moe,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from jaxkv.models.families.family import Family
from jaxkv.models.families.recurrent import (
    bamba,
    falcon_h1,
    granite_hybrid,
    jamba,
    kimi_linear,
    lfm2,
    mamba,
    mamba2,
    nemotron_h,
    qwen3_5,
    qwen3_next,
    zamba2,
)
from jaxkv.models.hf_config.config_json import ConfigJson, refuse_code
from jaxkv.models.hf_config.ignored_keys import read_ignoring, warn_of_ignored
from jaxkv.models.protocol import Params
from jaxkv.weights.directory import existing_directory, read_config_json, read_json_if_there
from jaxkv.weights.hub import fetch_weights, resolve_model
from jaxkv.weights.load import (
    Loadable,
    check_quantization,
    expected_shapes,
    load_by_rules,
    scheme_of,
)
from jaxkv.weights.rules import RuleSet
from jaxkv.weights.staging import Placed
from jaxkv.weights.write_rounded import write_rounded

DTYPES = ("auto", "float32", "bfloat16", "float16")

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        *mistral.FAMILIES,
        qwen2.FAMILY,
        qwen3.FAMILY,
        qwen3.VL_TEXT,
        granite.FAMILY,
        phi3.FAMILY,
        smollm3.FAMILY,
        seed_oss.FAMILY,
        hunyuan.FAMILY,
        arcee.FAMILY,
        *ernie4_5.FAMILIES,
        *glm4.FAMILIES,
        *olmo2.FAMILIES,
        exaone4.FAMILY,
        *cohere2.FAMILIES,
        gemma.FAMILY,
        gemma2.FAMILY,
        gemma3.FAMILY,
        gemma4.FAMILY,
        *multimodal.FAMILIES,
        gpt_oss.FAMILY,
        mixtral.FAMILY,
        minimax_m2.FAMILY,
        olmoe.FAMILY,
        qwen2_moe.FAMILY,
        qwen3_moe.FAMILY,
        qwen3_moe.VL_TEXT,
        *granite_moe.FAMILIES,
        glm4_moe.FAMILY,
        mamba.FAMILY,
        mamba2.FAMILY,
        bamba.FAMILY,
        granite_hybrid.FAMILY,
        nemotron_h.FAMILY,
        falcon_h1.FAMILY,
        qwen3_next.FAMILY,
        qwen3_5.TEXT,
        qwen3_5.EXPERTS,
        jamba.FAMILY,
        kimi_linear.FAMILY,
        zamba2.FAMILY,
        *lfm2.FAMILIES,
        *deepseek.FAMILIES,
    )
}
"""`model_type` -> family."""


def load_config(
    directory: str | Path, *, ignore_config_keys: Sequence[str] = (), warn: bool = True
) -> ModelConfig:
    """Reads `config.json`, and the EOS ids of `generation_config.json` if there is one.

    Args:
        directory: the model directory.
        ignore_config_keys: unknown keys of config.json to ignore, see `read_config`.
        warn: log a warning for each of them.

    Raises:
        BadCheckpoint: a file is missing or is no JSON object.
        UnknownConfig: the family, or a key that may change the result, is not supported.
        ValueError: a value has the wrong type or is out of range.
    """
    path = existing_directory(directory)
    config = read_config(read_config_json(path), ignore_config_keys, warn=warn)
    # A file beside config.json may name a format that is refused.
    scheme_of(path)
    generation = ConfigJson(
        read_json_if_there(path, "generation_config.json"), place="generation_config.json"
    )
    eos_ids = generation.take_ids("eos_token_id", config.vocab_size)
    return replace(config, eos_ids=eos_ids, assumed_eos=False) if eos_ids else config


def read_config(
    raw: Mapping[str, object], ignore_config_keys: Sequence[str] = (), *, warn: bool = True
) -> ModelConfig:
    """Returns the config of a parsed `config.json`; raises as `load_config` does.

    Args:
        raw: the parsed file.
        ignore_config_keys: keys to ignore with a warning that jaxkv does not know; "rope_scaling.name" is one of the
            nested object. A key that is not in the file, or that is known, is an error.
        warn: log a warning for each ignored key.
    """
    config = read_ignoring(raw, ignore_config_keys, _read)
    if warn:
        warn_of_ignored(raw, ignore_config_keys)
    return config


def _read(raw: Mapping[str, object]) -> ModelConfig:
    # Keys that name code are refused before the family is looked up.
    refuse_code(raw)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        what = f": model_type {str(model_type)[:80]!r} is not supported"
        if model_type is None:
            what = " lacks model_type"
        raise UnknownConfig(f"config.json{what}{_hint(raw)}; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type].read(raw)


def _hint(raw: Mapping[str, object]) -> str:
    """Returns what may be done about a file without a supported `model_type`, as the rest of a clause."""
    if raw.get("model_type") is None and "ssm_cfg" in raw:
        return f" (the file is of the package mamba_ssm{_of_mamba_ssm(raw)})"
    if raw.get("model_type") is None:
        named = raw.get("architectures")
        first = str(named[0]).lower() if isinstance(named, list) and named else ""
        likely = [name for name in FAMILIES if f"{name.replace('_', '')}forcausallm" == first]
        return f" (its architectures suggest {likely[0]!r})" if likely else ""
    text = raw.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    if isinstance(inner, str) and inner in FAMILIES:
        return f" (its text_config is {inner}, which is supported as a model of its own only)"
    return ""


def _of_mamba_ssm(raw: Mapping[str, object]) -> str:
    """Returns what may be done about a file of the package mamba_ssm, which names its mixer in `ssm_cfg`."""
    if raw.get("attn_layer_idx"):
        return ", and has attention layers, which Mamba has not in Transformers"
    mixer = raw["ssm_cfg"]
    newer = isinstance(mixer, Mapping) and mixer.get("layer") == "Mamba2"
    script = f"convert_{'mamba2' if newer else 'mamba'}_ssm_checkpoint_to_pytorch.py"
    return f": convert the model with {script} of Transformers' repository"


def build_model(config: ModelConfig, *, implementation: str | None = None) -> Decoder:
    """Returns the model of a config; `implementation` is the family of implementations of all its ops."""
    return Decoder(config, implementation)


def rules_for(config: ModelConfig) -> RuleSet:
    """Returns the weight rules of a config's family.

    Raises:
        UnknownConfig: the family is none of `FAMILIES`.
    """
    if config.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnknownConfig(f"no weight rules for the family {config.family!r}; known are {known}")
    return FAMILIES[config.family].rules


def load_params(
    directory: str | os.PathLike[str],
    model: Loadable,
    *,
    dtype: str,
    device: jax.Device | Sharding | None = None,  # pyright: ignore[reportInvalidTypeForm]
    quantization: str | None = None,
    progress: bool = True,
    placed: Placed | None = None,
) -> PyTree[jax.Array]:
    """Reads a checkpoint into the parameters of a model by the rules of its family; see `load_by_rules`."""
    rules = rules_for(model.config)
    return load_by_rules(
        directory,
        model,
        rules,
        dtype=dtype,
        device=device,
        quantization=quantization,
        progress=progress,
        placed=placed,
    )


def expected_params(
    directory: Path, model: Loadable, *, dtype: str, quantization: str | None = None
) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the types of the parameters that `load_params` is expected to return; only config files are read.

    Raises:
        ValueError: `quantization` is unknown, or the checkpoint is quantised already.
    """
    scheme = scheme_of(directory)
    check_quantization(quantization, scheme)
    rules = rules_for(model.config)
    return expected_shapes(model, rules, dtype=dtype, scheme=scheme, quantization=quantization)


def convert_checkpoint(
    model: str | Path,
    output: str | Path,
    *,
    quantization: str,
    revision: str | None = None,
    dtype: str = "auto",
    ignore_config_keys: Sequence[str] = (),
    progress: bool = False,
) -> str:
    """Writes a plain checkpoint with projections and experts rounded to 8 or 4 bits, as `LLM(quantization=)` reads it.

    Args:
        model: a model directory, or a name on the Hugging Face Hub.
        output: the new directory.
        quantization: "fp8", "int8" or "int4".
        revision: branch, tag or commit of a model on the hub.
        dtype: dtype to compute in, which is that of scales, see `load_model`.
        ignore_config_keys: keys of config.json to ignore, see `LLM`.
        progress: show progress bars on stderr.

    Returns:
        One line on what was written.

    Raises:
        ValueError: an option is unknown, or the checkpoint is quantised already.
        FileExistsError: the output is there already.
        UnknownConfig, BadCheckpoint, OSError: as `load_model`.
    """
    directory = resolve_model(model, revision, progress=progress)
    config = load_config(directory, ignore_config_keys=ignore_config_keys)
    check_quantization(quantization, scheme_of(directory))
    fetch_weights(model, directory, revision, progress=progress)
    decoder, stored = build_model(config), resolve_dtype(dtype, config.dtype)
    return write_rounded(
        directory,
        Path(output),
        decoder,
        rules_for(config),
        dtype=stored,
        quantization=quantization,
    )


def resolve_dtype(dtype: str, checkpoint: str) -> str:
    """Returns the parameters' dtype name; "auto" is the checkpoint's, and short names such as "bf16" are accepted.

    Raises:
        ValueError: the dtype is not supported.
    """
    dtype = dtype_name(dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return checkpoint if dtype == "auto" else dtype


def load_model(
    model: str | Path | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    implementation: str | None = None,
    progress: bool = False,
    ignore_config_keys: Sequence[str] = (),
) -> tuple[Params, Decoder]:
    """Reads a model for `jaxkv.generate`. For a tokenizer and an engine with a cache, use `LLM`.

    Examples:
        >>> params, model = jaxkv.load_model()
        >>> jaxkv.generate(params, model, [[1, 2, 3]], eos_ids=model.config.eos_ids).tokens

    Args:
        model: a Hugging Face model directory (config.json, safetensors), or a name on the Hugging Face Hub, such as
            "Qwen/Qwen3-0.6B"; `None` for the small model inside the package. Nothing in it is executed.
        revision: branch, tag or commit of a model on the hub; its main branch if not given.
        dtype: dtype of the parameters: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
        quantization: "fp8", "int8" or "int4" to round the weights of a plain checkpoint, see `LLM`.
        implementation: family of implementations that every op must use, see `LLM`; `None` for the best.
        progress: show progress bars on stderr.
        ignore_config_keys: keys of config.json to ignore, see `LLM`.

    Returns:
        The parameters, a nested dict of arrays on JAX's default device, and the model, static and hashable.

    Raises:
        ValueError: `dtype` is not one of these.
        UnknownConfig: the model is not supported.
        BadCheckpoint: a file is missing or damaged, or there is no model of this name.
        OSError: the hub cannot be reached and its cache has not this model, or the disk is full.
    """
    directory = resolve_model(model, revision, progress=progress)
    config = load_config(directory, ignore_config_keys=ignore_config_keys)
    decoder = build_model(config, implementation=implementation)
    stored = resolve_dtype(dtype, config.dtype)
    check_quantization(quantization, scheme_of(directory))
    fetch_weights(model, directory, revision, progress=progress)
    params = load_params(
        directory, decoder, dtype=stored, quantization=quantization, progress=progress
    )
    return params, decoder

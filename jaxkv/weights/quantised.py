"""Reads the storage format of weights from `quantization_config` in a config.json.

Only weight-only formats are supported: each number has one scale, and the weight is their product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxkv.errors import UnknownConfig
from jaxkv.wording import clip

PLACE = "config.json: quantization_config"
# Which weights are quantised follows from the file's tensors; the other keys are hints for other runtimes.
_HARMLESS = frozenset(
    {"quant_method", "modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"}
)
# Qwen3.8's file denies what weight_block_size excludes.
_PER_TENSOR = ("weight_per_tensor", "act_per_tensor")
_READABLE = (
    "jaxkv reads 'fp8' with weight_block_size, 'mxfp4' and weights that are not quantised: take a checkpoint of one of "
    "these, or have Transformers dequantise the model and save it"
)
_OTHER_KEYS = {"compression_config": "compressed-tensors", "quantization": "MLX"}
"""Other key of config.json for a format -> the library."""

_FORMS = (
    ("quant_algo", "ModelOpt"),
    ("producer", "ModelOpt"),
    ("config_groups", "compressed-tensors"),
    ("load_in_4bit", "bitsandbytes"),
    ("load_in_8bit", "bitsandbytes"),
    ("desc_act", "GPTQ"),
    ("w_bit", "AWQ"),
    ("zero_point", "AWQ"),
    ("bits", "MLX"),
)
"""(Key of a quantization_config without a method, the library that writes it), the clearest first."""

MODELOPT = "hf_quant_config.json"
BESIDE = {MODELOPT: "ModelOpt", "quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}
"""File beside config.json that names a format -> the library."""

_SCALES = (None, "float", "ue8m0")
_LARGEST_BLOCK = 2**16


@dataclass(frozen=True)
class Float8Blocks:
    """DeepSeek-V3's format: e4m3 numbers `*.weight`, and the factor of each block in `*.weight_scale_inv`.

    Blocks at the lower and right edges may be smaller.

    Attributes:
        rows: rows of a block.
        columns: columns of a block.
    """

    rows: int
    columns: int


@dataclass(frozen=True)
class Float4Experts:
    """GPT-OSS's form of MXFP4 (OCP Microscaling Formats 1.0), for experts only.

    `*_blocks` holds e2m1 numbers, two per byte, row by row of the outputs; `*_scales` an exponent per 32 numbers.
    """


Quantised = Float8Blocks | Float4Experts


def read_quantised(raw: Mapping[str, object]) -> Quantised | None:
    """Returns the quantised format of a checkpoint from its parsed config.json; `None` if it is not quantised.

    Formats that also quantise activations at run time are read, but activations are not quantised here.

    Raises:
        UnknownConfig: the format or one of its options is not supported.
    """
    for key, value in raw.items():
        if key in _OTHER_KEYS and value is not None and raw.get("quantization_config") is None:
            raise UnknownConfig(
                f"config.json sets {key}, so the weights are in the format of {_OTHER_KEYS[key]}; {_READABLE}"
            )
    settings = raw.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise UnknownConfig(f"{PLACE} must be an object, got {clip(repr(settings), 80)}")
    method = settings.get("quant_method")
    if method == "mxfp4":
        _reject_others(settings, set())
        return Float4Experts()
    if method == "fp8" and settings.get("weight_block_size") is not None:
        _expect(settings, "fmt", (None, "e4m3"))
        _expect(settings, "activation_scheme", (None, "dynamic"))
        _expect(settings, "scale_fmt", _SCALES)
        for key in _PER_TENSOR:
            _expect(settings, key, (None, False))
        _reject_others(
            settings, {"fmt", "activation_scheme", "scale_fmt", "weight_block_size", *_PER_TENSOR}
        )
        return _blocks(settings["weight_block_size"])
    raise UnknownConfig(
        f"{PLACE} sets quant_method = {clip(repr(method), 80)}{_details(settings)}; {_READABLE}"
    )


def refuse_beside(names: Mapping[str, Mapping[str, object]], *, is_quantised: bool) -> None:
    """Raises `UnknownConfig` if a file beside config.json has a quantised format.

    Args:
        names: name of a file of `BESIDE` -> its JSON object, empty if there is no such file.
        is_quantised: whether config.json has a quantised format, which is then the one that counts for GPTQ and AWQ.
    """
    for name, settings in names.items():
        if name != MODELOPT:
            algorithm = None if is_quantised or not settings else BESIDE[name]
        else:
            inner = settings.get("quantization")
            algorithm = inner.get("quant_algo") if isinstance(inner, Mapping) else settings or None
        if algorithm is not None:
            raise UnknownConfig(
                f"{name} says that the weights are in the format {clip(repr(algorithm), 80)} of {BESIDE[name]}; "
                f"{_READABLE}"
            )


def _details(settings: Mapping[str, object]) -> str:
    """Returns what a quantization_config that is not read says about its format, as the end of a clause."""
    method = settings.get("quant_method")
    if method == "fp8":
        return " without weight_block_size"
    if method == "bitsandbytes":
        bits = 4 if settings.get("load_in_4bit") or settings.get("_load_in_4bit") else 8
        return f" with {bits} bits"
    if method is None:
        return next((f", in the form of {form}" for key, form in _FORMS if key in settings), "")
    detail = settings.get("format", settings.get("quant_algo"))
    return f" in the format {clip(repr(detail), 80)}" if detail is not None else ""


def _blocks(size: object) -> Float8Blocks:
    if (
        isinstance(size, Sequence)
        and len(size) == 2
        and all(type(side) is int and 0 < side <= _LARGEST_BLOCK for side in size)
    ):
        return Float8Blocks(*size)
    raise UnknownConfig(
        f"{PLACE}: weight_block_size must be two integers in [1, {_LARGEST_BLOCK}], got {clip(repr(size), 80)}"
    )


def _expect(settings: Mapping[str, object], key: str, values: tuple[object, ...]) -> None:
    if settings.get(key) not in values:
        known = ", ".join(repr(value) for value in values if value is not None)
        raise UnknownConfig(
            f"{PLACE} sets {key} = {clip(repr(settings[key]), 80)}; supported: {known}"
        )


def _reject_others(settings: Mapping[str, object], known: set[str]) -> None:
    for key, value in settings.items():
        if value is not None and key not in known and key not in _HARMLESS:
            raise UnknownConfig(
                f"{PLACE} sets {clip(repr(key), 80)} = {clip(repr(value), 80)}, which is not supported"
            )

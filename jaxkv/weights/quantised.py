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
        _reject_others(settings, {"fmt", "activation_scheme", "scale_fmt", "weight_block_size"})
        return _blocks(settings["weight_block_size"])
    lacking = " without weight_block_size" if method == "fp8" else ""
    raise UnknownConfig(
        f"{PLACE} sets quant_method = {clip(repr(method), 80)}{lacking}; jaxkv reads 'fp8' with weight_block_size, "
        "'mxfp4' and weights that are not quantised: take a checkpoint of one of these, or have Transformers "
        "dequantise the model and save it"
    )


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

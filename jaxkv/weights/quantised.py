"""What `quantization_config` in a config.json says about how weights are stored. Reads no weights.

Only formats that say what every weight is are understood: each number has one scale, and their product is the weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxkv.errors import UnknownConfig
from jaxkv.wording import clip

PLACE = "config.json: quantization_config"
# Which weights are stored like this shows in the file, and what else runs them does not concern us.
_HARMLESS = frozenset(
    {"quant_method", "modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"}
)
_SCALES = (None, "float", "ue8m0")
_LARGEST_BLOCK = 2**16


@dataclass(frozen=True)
class Float8Blocks:
    """e4m3 numbers `*.weight`, and `*.weight_scale_inv` with what each block of them is multiplied by.

    DeepSeek-V3's format; the blocks at the lower and right edge may be cut.

    Attributes:
        rows: of a block.
        columns: of a block.
    """

    rows: int
    columns: int


@dataclass(frozen=True)
class Float4Experts:
    """Experts `*_blocks` of e2m1 numbers, two in a byte, and `*_scales` with an exponent for each 32 of them.

    GPT-OSS's form of MXFP4 (OCP Microscaling Formats 1.0): an expert's numbers lie row by row, by outputs.
    """


Quantised = Float8Blocks | Float4Experts


def read_quantised(raw: Mapping[str, object]) -> Quantised | None:
    """Returns how the weights beside a parsed config.json are stored, `None` if as plain numbers.

    Activations are not rounded here, whatever the format would have done to them where it runs in 8 bits.

    Raises:
        UnknownConfig: in some other way, or with an option that is not understood.
    """
    said = raw.get("quantization_config")
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise UnknownConfig(f"{PLACE} must be an object, got {clip(repr(said), 80)}")
    method = said.get("quant_method")
    if method == "mxfp4":
        _refuse_others(said, set())
        return Float4Experts()
    if method == "fp8" and said.get("weight_block_size") is not None:
        _expect(said, "fmt", (None, "e4m3"))
        _expect(said, "activation_scheme", (None, "dynamic"))
        _expect(said, "scale_fmt", _SCALES)
        _refuse_others(said, {"fmt", "activation_scheme", "scale_fmt", "weight_block_size"})
        return _blocks(said["weight_block_size"])
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


def _expect(said: Mapping[str, object], key: str, values: tuple[object, ...]) -> None:
    if said.get(key) not in values:
        known = ", ".join(repr(value) for value in values if value is not None)
        raise UnknownConfig(f"{PLACE} sets {key} = {clip(repr(said[key]), 80)}; supported: {known}")


def _refuse_others(said: Mapping[str, object], taken: set[str]) -> None:
    for key, value in said.items():
        if value is not None and key not in taken and key not in _HARMLESS:
            raise UnknownConfig(
                f"{PLACE} sets {clip(repr(key), 80)} = {clip(repr(value), 80)}, which is not understood"
            )

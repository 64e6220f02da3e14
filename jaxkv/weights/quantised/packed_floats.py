"""Reads matrices of e2m1 numbers with two per byte: NVFP4 of ModelOpt and compressed-tensors, MXFP4 of the latter.

The codes are uint8 [out, in / 2], that of the even column in the lower half of a byte: `weight` of ModelOpt,
`weight_packed` of compressed-tensors. `weight_scale` of NVFP4 is float8_e4m3fn [out, in / 16], and one float32 for the
matrix multiplies it (ModelOpt's `weight_scale_2`) or divides it (`weight_global_scale` of compressed-tensors). That of
MXFP4 is an 8-bit exponent per 32 columns. GPT-OSS has another form of MXFP4 (`mxfp4.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.quantised.quantised_tensor import (
    E4M3,
    E8M0,
    QuantisedTensor,
    bytes_of,
    check,
    rows_of,
    unpacked,
)
from jaxkv.weights.quantised.scheme import Scheme
from jaxkv.weights.safetensors import StoredTensor
from jaxkv.wording import clip

_NV_GROUP, _MX_GROUP = 16, 32


@dataclass(frozen=True)
class _Rows:
    """Reads rows; `of_matrix` is the scale of the matrix, by which NVFP4's others are divided or multiplied."""

    tensors: tuple[StoredTensor, ...]
    of_matrix: np.float32 | None
    divides: bool

    @property
    def scale_dtype(self) -> np.dtype:
        return E8M0 if self.of_matrix is None else np.dtype(np.float32)

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        return unpacked(rows_of(self.tensors[0], np.dtype(np.uint8), first, count), 4)

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        if self.of_matrix is None:
            return rows_of(self.tensors[1], E8M0, first, count)
        scales = rows_of(self.tensors[1], E4M3, first, count).astype(np.float32)
        return scales / self.of_matrix if self.divides else scales * self.of_matrix

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        return None


def read(
    name: str, tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> tuple[QuantisedTensor, tuple[str, ...]] | None:
    """Returns the weight whose codes have this name and the names of its tensors; `None` if it is none.

    Raises:
        BadCheckpoint: a shape or dtype contradicts the format, or the scale of the matrix cannot be one.
    """
    del scheme
    weight = name.removesuffix("_packed")
    codes, scales = tensors[name], tensors.get(f"{weight}_scale")
    if codes.dtype != "U8" or scales is None:
        return None
    if len(codes.shape) != 2:
        raise BadCheckpoint(
            f"{codes.path}: {clip(repr(name))} of 4 bits has shape {list(codes.shape)}, wanted two axes"
        )
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    divides = weight != name
    is_mx = divides and scales.dtype != "F8_E4M3"
    group = _MX_GROUP if is_mx else _NV_GROUP
    dtypes = ("U8", "F8_E8M0") if is_mx else ("F8_E4M3",)
    check(scales, ((rows, -(-columns // group)),), dtypes)
    parts, factor = [codes, scales], None
    if not is_mx:
        whole = f"{weight}_{'global_scale' if divides else 'scale_2'}"
        if whole not in tensors:
            raise BadCheckpoint(
                f"{codes.path}: {clip(repr(scales.name))} of NVFP4 needs the scale of the matrix, and there is no "
                f"{clip(repr(whole))}"
            )
        parts.append(tensors[whole])
        factor = _factor(tensors[whole], divides=divides)
    made = QuantisedTensor(
        weight,
        (rows, columns),
        "float4_e2m1fn",
        _Rows(tuple(parts), factor, divides),
        np.arange(columns) // group,
    )
    return made, tuple(part.name for part in parts)


def _factor(tensor: StoredTensor, *, divides: bool) -> np.float32:
    """Returns the scale of a matrix, which is 0 for a matrix of zeros if it multiplies."""
    check(tensor, ((), (1,)), ("F32",))
    (factor,) = bytes_of(tensor, 0, 4).view(np.float32)
    if not np.isfinite(factor) or (divides and factor == 0):
        wanted = "a finite number other than 0" if divides else "a finite number"
        raise BadCheckpoint(
            f"{tensor.path}: {clip(repr(tensor.name))} is {factor}, wanted {wanted}"
        )
    return factor

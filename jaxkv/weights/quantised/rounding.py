"""Rounds plain weights of a checkpoint to 8 or 4 bits while they are read, without calibration.

Numbers are rounded to the nearest code, symmetric around zero; the largest of a row or group has the largest code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

from jaxkv.weights.quantised.quantised_tensor import E4M3, QuantisedTensor
from jaxkv.weights.safetensors import StoredTensor


class Rounding(NamedTuple):
    """A form to which weights are rounded.

    Attributes:
        code: name in `pallas_kernels.formats.few_bits.CODES`.
        largest: number of the code that the largest weight of a group gets.
        groups: columns of a group, the first that divides a row; none for whole rows.
        rounds_rows: whether activations are rounded too, see `FewBits`.
    """

    code: str
    largest: float
    groups: tuple[int, ...] = ()
    rounds_rows: bool = False

    def group(self, columns: int) -> int:
        """Returns the columns of a group of a row."""
        return next((group for group in self.groups if columns % group == 0), columns)


ROUNDINGS: Mapping[str, Rounding] = {
    "fp8": Rounding("float8_e4m3fn", 448.0, rounds_rows=True),
    "int8": Rounding("int8", 127.0),
    "int4": Rounding("int4", 7.0, (128, 64, 32)),
}
"""`quantization` -> how the weights of a plain checkpoint are rounded."""


@dataclass(frozen=True)
class _Rows:
    """Rounds rows of a tensor as they are read."""

    tensors: tuple[StoredTensor, ...]
    rounding: Rounding
    columns: int
    scale_dtype: np.dtype

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        grouped = self._grouped(first, count)
        scales = self._scales(grouped).astype(np.float32)[..., None]
        # A group of zeros has no scale to divide by.
        numbers = grouped / np.where(scales == 0, np.float32(1), scales)
        largest = self.rounding.largest
        if self.rounding.code == "float8_e4m3fn":
            codes = np.clip(numbers, -largest, largest).astype(E4M3).view(np.uint8)
        elif self.rounding.code == "int8":
            codes = np.clip(np.rint(numbers), -largest, largest).astype(np.int8).view(np.uint8)
        else:
            codes = (np.clip(np.rint(numbers), -8, 7) + 8).astype(np.uint8)
        return codes.reshape(count, self.columns)

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        return self._scales(self._grouped(first, count))

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        return None

    def _grouped(self, first: int, count: int) -> Float[np.ndarray, "rows groups group"]:
        wide = np.empty(count * self.columns, np.float32)
        self.tensors[0].read(wide, first * self.columns)
        return wide.reshape(count, -1, self.rounding.group(self.columns))

    def _scales(
        self, grouped: Float[np.ndarray, "rows groups group"]
    ) -> Shaped[np.ndarray, "rows groups"]:
        return (np.abs(grouped).max(axis=2) / np.float32(self.rounding.largest)).astype(
            self.scale_dtype
        )


def scales_for(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of scales of a model in `dtype`: the same, or float32 for float16, whose range is too small.

    Codes are rounded with the scale as it is stored, so its own rounding adds no error.
    """
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def rounded(tensor: StoredTensor, rounding: Rounding, dtype: np.dtype) -> QuantisedTensor:
    """Returns a plain tensor as one of few bits.

    Args:
        tensor: the tensor, whose last axis is the inputs.
        rounding: how it is rounded.
        dtype: dtype to compute in, see `scales_for`.
    """
    columns = tensor.shape[-1]
    rows = _Rows((tensor,), rounding, columns, scales_for(dtype))
    groups = np.arange(columns) // rounding.group(columns)
    return QuantisedTensor(
        tensor.name,
        tensor.shape,
        rounding.code,
        rows,
        groups,
        transposed=tensor.transposed,
        rounds_rows=rounding.rounds_rows,
    )

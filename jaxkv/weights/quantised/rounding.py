"""Rounds plain weights of a checkpoint to 8 or 4 bits while they are read, without calibration.

Numbers are rounded to the nearest code, symmetric around zero; the largest of a row or group has the largest code.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Shaped, UInt8

from jaxkv.weights.quantised.quantised_tensor import PIECE, QuantisedTensor
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

_LEAST_NORMAL, _FIXED = np.float32(2.0**-6), np.float32(2.0**14)
"""Of float8_e4m3fn, the least number with an exponent; of float32, the least whose last bit is 2**-9."""


class _Scales:
    """The scales of a tensor's rows, kept from when its codes are made until they are read, so that rows are read once.

    Several threads may make the scales of the same rows, which are then equal.
    """

    def __init__(self, rows: int, groups: int, dtype: np.dtype) -> None:
        self._made: np.ndarray | None = np.empty((rows, groups), dtype)
        self._are_made = np.zeros(rows, np.bool_)
        self._unread = rows
        self._lock = threading.Lock()

    def keep(self, first: int, scales: Shaped[np.ndarray, "rows groups"]) -> None:
        """Keeps the scales of rows from `first` on."""
        with self._lock:
            if self._made is not None:
                self._made[first : first + len(scales)] = scales
                self._are_made[first : first + len(scales)] = True

    def take(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"] | None:
        """Returns the scales of rows if all are made; the memory is freed once every row was asked for."""
        with self._lock:
            made = self._made
            self._unread -= count
            if self._unread <= 0:
                self._made = None
            if made is None or not self._are_made[first : first + count].all():
                return None
            return made[first : first + count].copy()


@dataclass(frozen=True)
class _Rows:
    """Rounds rows of a tensor as they are read, a few at a time, which stay in a core's cache."""

    tensors: tuple[StoredTensor, ...]
    rounding: Rounding
    columns: int
    scale_dtype: np.dtype
    known: _Scales

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        codes = np.empty((count, self.columns), np.uint8)
        for begin, grouped in self._pieces(first, count):
            scales = self._scales(grouped)
            self.known.keep(first + begin, scales)
            divisors = scales.astype(np.float32)[..., None]
            # A group of zeros has no scale to divide by.
            divisors[divisors == 0] = 1
            numbers = np.divide(grouped, divisors, out=grouped).reshape(-1, self.columns)
            codes[begin : begin + len(numbers)] = self._rounded(numbers)
        return codes

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        known = self.known.take(first, count)
        if known is not None:
            return known
        made = np.empty((count, self._groups[0]), self.scale_dtype)
        for begin, grouped in self._pieces(first, count):
            made[begin : begin + len(grouped)] = self._scales(grouped)
        return made

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        return None

    def _rounded(
        self, numbers: Float32[np.ndarray, "rows columns"]
    ) -> UInt8[np.ndarray, "rows columns"]:
        """Returns the codes of numbers, which it may change."""
        if self.rounding.code == "float8_e4m3fn":
            return e4m3_codes(numbers)
        np.rint(numbers, out=numbers)
        largest = self.rounding.largest
        if self.rounding.code == "int8":
            return np.clip(numbers, -largest, largest, out=numbers).astype(np.int8).view(np.uint8)
        np.clip(numbers, -8, 7, out=numbers)
        numbers += 8
        return numbers.astype(np.uint8)

    def _pieces(
        self, first: int, count: int
    ) -> Iterator[tuple[int, Float32[np.ndarray, "rows groups group"]]]:
        """Yields some rows after the others with the number of rows before them; each time in the same memory."""
        some = min(count, max(1, PIECE // self.columns))
        memory = np.empty(some * self.columns, np.float32)
        for begin in range(0, count, max(1, some)):
            wide = memory[: min(some, count - begin) * self.columns]
            self.tensors[0].read(wide, (first + begin) * self.columns)
            yield begin, wide.reshape(-1, *self._groups)

    @property
    def _groups(self) -> tuple[int, int]:
        """Groups of a row, and columns of a group."""
        group = self.rounding.group(self.columns)
        return self.columns // group, group

    def _scales(
        self, grouped: Float32[np.ndarray, "rows groups group"]
    ) -> Shaped[np.ndarray, "rows groups"]:
        return (np.abs(grouped).max(axis=2) / np.float32(self.rounding.largest)).astype(
            self.scale_dtype
        )


def e4m3_codes(numbers: Float32[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """Returns the bytes of the nearest float8_e4m3fn of finite numbers, even ones on ties, and at most 448.

    It has the bits of a cast by ml_dtypes and is five times as fast (Micikevicius et al., FP8 Formats for Deep
    Learning, 2022, for the format).
    """
    bits = numbers.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    # Of float32's 23 bits behind the point 3 stay. What is added carries over if the rest is more than half, or half
    # and the last bit that stays is odd. Exponents begin 120 later.
    codes = size >> np.uint32(20)
    codes &= np.uint32(1)
    codes += size
    codes += np.uint32(2**19 - 1)
    codes >>= np.uint32(20)
    codes -= np.uint32(120 << 3)
    # Numbers without an exponent are multiples of 2**-9, to which float32 rounds numbers from 2**14 on.
    fixed = (size.view(np.float32) + _FIXED).view(np.uint32)
    fixed -= _FIXED.view(np.uint32)
    np.copyto(codes, fixed, where=size < _LEAST_NORMAL.view(np.uint32))
    np.minimum(codes, np.uint32(0x7E), out=codes)
    codes |= bits >> np.uint32(24) & np.uint32(0x80)
    return codes.astype(np.uint8)


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
    group, scale_dtype = rounding.group(columns), scales_for(dtype)
    known = _Scales(math.prod(tensor.shape[:-1]), columns // group, scale_dtype)
    rows = _Rows((tensor,), rounding, columns, scale_dtype, known)
    groups = np.arange(columns) // group
    return QuantisedTensor(
        tensor.name,
        tensor.shape,
        rounding.code,
        rows,
        groups,
        transposed=tensor.transposed,
        rounds_rows=rounding.rounds_rows,
    )

"""Reads block-scaled tensors: 8-bit or 4-bit numbers with one scale per block, dequantised while they are read.

Each number is multiplied by its scale in float32, and the product is rounded once to the requested dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.quantised import Float8Blocks, Quantised
from jaxkv.weights.safetensors import FLOAT_DTYPES, StoredTensor, all_finite
from jaxkv.wording import clip

PIECE = 2**18
"""Elements decoded at once, so that they fit in a core's cache; at least one row."""

_BYTES = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
# 8-bit exponents; the last code is NaN.
_E8M0 = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_E2M1 = _BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
# The two numbers of a byte, that of the lower half first, as one table entry of eight bytes.
_E2M1_PAIRS = np.stack((_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]), axis=1).view(np.uint64)[:, 0]


@dataclass(frozen=True)
class BlockScaled:
    """A quantised tensor with one scale per block of rows and columns; all axes but the last count as rows.

    Attributes:
        name: name of the dequantised weight.
        shape: shape of the dequantised weight.
        numbers: the stored numbers, one or two per byte.
        scales: the stored scales, block rows first.
        block: rows and columns of a block; blocks at the edges may be smaller.
        transposed: whether the last two axes are exchanged relative to the family's rules.
    """

    name: str
    shape: tuple[int, ...]
    numbers: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numbers.nbytes + self.scales.nbytes

    @property
    def path(self) -> Path:
        """Path of the file, for error messages."""
        return self.numbers.path

    def read(self, target: Float[np.ndarray, " elements"], first: int = 0) -> None:
        """Fills `target` with dequantised rows in order, rounded to the target's dtype.

        Args:
            target: whole rows.
            first: number of the element before them, a multiple of a row's.

        Raises:
            BadCheckpoint: the file has become shorter, or an element or scale is not finite in the target's dtype.
        """
        columns = self.shape[-1]
        if target.size == 0:
            return
        filled = target.reshape(-1, columns)
        step = max(1, PIECE // columns)
        for begin in range(0, len(filled), step):
            piece = filled[begin : begin + step]
            row = first // columns + begin
            values = self._numbers(row, len(piece))
            with np.errstate(over="ignore", under="ignore"):
                self._scale(values, row)
                np.copyto(piece, values, casting="unsafe")
            if not all_finite(piece.reshape(-1)):
                raise BadCheckpoint(
                    f"{self.path}: {self.name!r} holds a NaN or a number too large for {piece.dtype.name}"
                )

    def equals(self, other: object) -> bool:
        """Whether both have the same stored numbers, scales and blocks."""
        return (
            isinstance(other, BlockScaled)
            and self.block == other.block
            and self.numbers.equals(other.numbers)
            and self.scales.equals(other.scales)
        )

    def _numbers(self, first: int, count: int) -> Float[np.ndarray, "rows columns"]:
        """Returns `count` rows from row `first` on, as float32 without scales."""
        columns = self.shape[-1]
        if self.numbers.dtype == "F8_E4M3":
            stored = self._bytes(self.numbers, first * columns, count * columns)
            return np.take(_E4M3, stored, mode="clip").reshape(count, columns)
        packed = self._bytes(self.numbers, first * columns // 2, count * columns // 2)
        return np.take(_E2M1_PAIRS, packed, mode="clip").view(np.float32).reshape(count, columns)

    def _scale(self, values: Float[np.ndarray, "rows columns"], first: int) -> None:
        """Multiplies rows in place by the scales of their blocks; `first` is the number of the first row."""
        tall, wide = self.block
        count, columns = values.shape
        top, across = first // tall, -(-columns // wide)
        scales = self._scale_rows(top, (first + count - 1) // tall + 1 - top, across)
        each = scales[np.arange(first, first + count) // tall - top]
        if columns % wide:
            values *= np.repeat(each, wide, axis=1)[:, :columns]
        else:
            blocks = values.reshape(count, across, wide)
            blocks *= each[:, :, None]

    def _scale_rows(self, first: int, count: int, across: int) -> Float[np.ndarray, "rows across"]:
        stored = FLOAT_DTYPES.get(self.scales.dtype, np.dtype(np.uint8))
        size = stored.itemsize
        raw = self._bytes(self.scales, first * across * size, count * across * size)
        scales = _E8M0[raw] if stored == np.uint8 else raw.view(stored).astype(np.float32)
        if not all_finite(scales):
            raise BadCheckpoint(f"{self.path}: {self.scales.name!r} holds a NaN or an infinity")
        return scales.reshape(count, across)

    @staticmethod
    def _bytes(tensor: StoredTensor, begin: int, count: int) -> UInt8[np.ndarray, " bytes"]:
        raw = np.empty(count, np.uint8)
        tensor.read_bytes(raw, tensor.start + begin)
        return raw


def with_scales(
    tensors: Mapping[str, StoredTensor], quantised: Quantised | None
) -> dict[str, StoredTensor | BlockScaled]:
    """Returns a checkpoint's tensors by name, with each pair of numbers and scales joined to one `BlockScaled`.

    Tensors without scales are returned unchanged.

    Raises:
        BadCheckpoint: a shape or dtype contradicts the format, or a weight is stored twice.
    """
    joined: dict[str, StoredTensor | BlockScaled] = dict(tensors)
    if quantised is None:
        return joined
    pair = _float8 if isinstance(quantised, Float8Blocks) else _float4
    for name, tensor in tensors.items():
        made = pair(tensor, tensors, quantised)
        if made is None:
            continue
        del joined[name], joined[made.scales.name]
        if made.name in joined:
            shown = clip(repr(made.name))
            raise BadCheckpoint(f"{made.path} holds {shown} twice, with scales and without")
        joined[made.name] = made
    return joined


def _float8(
    numbers: StoredTensor, tensors: Mapping[str, StoredTensor], quantised: Quantised
) -> BlockScaled | None:
    assert isinstance(quantised, Float8Blocks)
    scales = tensors.get(f"{numbers.name}_scale_inv")
    if scales is None or numbers.dtype != "F8_E4M3":
        return None
    if len(numbers.shape) != 2:
        raise BadCheckpoint(
            f"{numbers.path}: {clip(repr(numbers.name))} of 8 bits has shape {list(numbers.shape)}, wanted two axes"
        )
    block = quantised.rows, quantised.columns
    shape = tuple(-(-side // of) for side, of in zip(numbers.shape, block, strict=True))
    _check_scales(scales, shape, (*FLOAT_DTYPES, "F8_E8M0"))
    return BlockScaled(numbers.name, numbers.shape, numbers, scales, block)


def _float4(
    numbers: StoredTensor, tensors: Mapping[str, StoredTensor], quantised: Quantised
) -> BlockScaled | None:
    del quantised
    name = numbers.name.removesuffix("_blocks")
    scales = tensors.get(f"{name}_scales")
    if name == numbers.name or scales is None:
        return None
    if numbers.dtype != "U8" or len(numbers.shape) != 4 or numbers.shape[3] != 16:
        raise BadCheckpoint(
            f"{numbers.path}: {clip(repr(numbers.name))} is {numbers.dtype} {list(numbers.shape)}, "
            "wanted U8 [experts, outputs, blocks, 16]"
        )
    experts, outputs, blocks, _ = numbers.shape
    _check_scales(scales, (experts, outputs, blocks), ("U8",))
    shape = (experts, outputs, 32 * blocks)
    return BlockScaled(name, shape, numbers, scales, (1, 32), transposed=True)


def _check_scales(scales: StoredTensor, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if scales.shape != shape or scales.dtype not in dtypes:
        raise BadCheckpoint(
            f"{scales.path}: {clip(repr(scales.name))} is {scales.dtype} {list(scales.shape)}, "
            f"wanted {' or '.join(dtypes)} {list(shape)}"
        )

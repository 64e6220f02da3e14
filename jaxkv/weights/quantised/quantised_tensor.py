"""`QuantisedTensor`: one weight in 8 or 4 bits in a checkpoint, of any format, by rows in the layout of `FewBits`."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.safetensors import FLOAT_DTYPES, StoredTensor, all_finite
from jaxkv.wording import clip

PIECE = 2**18
"""Elements decoded at once, so that they fit in a core's cache; at least one row."""

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_BYTES = np.arange(256, dtype=np.uint8)
_LOW, _HIGH = _BYTES & 15, _BYTES >> 4
_NUMBERS = {
    "float8_e4m3fn": _BYTES.view(E4M3).astype(np.float32),
    "int8": _BYTES.view(np.int8).astype(np.float32),
    "int4": _BYTES.astype(np.float32),
    "float4_e2m1fn": np.tile(_BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32), 16),
}
"""Code -> the number of each byte that is a code; int4 without the zero point, which is 8 if there is none."""

STORED = {"float8_e4m3fn": E4M3, "int8": np.dtype(np.int8), "int4": np.dtype(np.uint8)} | {
    "float4_e2m1fn": np.dtype(np.uint8)
}
"""Code -> dtype of `FewBits.codes`."""


@runtime_checkable
class Rows(Protocol):
    """Reads rows of a weight's codes, scales and zero points; columns are in the order of the weight's own.

    `scales` and `zeros` have one column for each of the file's groups.
    """

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """The file's tensors that it reads, the codes first."""
        ...

    @property
    def scale_dtype(self) -> np.dtype:
        """Dtype of the scales."""
        ...

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        """Returns codes, one per byte; those of 4 bits are below 16."""
        ...

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        """Returns scales."""
        ...

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        """Returns zero points of integers, of int8 codes relative to 0; `None` if all are in the middle."""
        ...


class Columns(NamedTuple):
    """The columns of a weight in an order in which those of a group are adjacent, and groups equally large.

    Attributes:
        order: column of the weight that each column is; `None` for the same one.
        group: columns of a group.
        stored: for each group, the file's group.
    """

    order: Int[np.ndarray, " columns"] | None
    group: int
    stored: Int[np.ndarray, " groups"]

    @classmethod
    def of(cls, groups: Int[np.ndarray, " columns"]) -> "Columns":
        """Returns the columns, given the file's group of each.

        Groups of unequal size, as at the edge of a matrix, are divided.
        """
        order = None
        if np.any(groups[1:] < groups[:-1]):
            order = np.argsort(groups, kind="stable").astype(np.int32)
            groups = groups[order]
        begins = np.flatnonzero(np.diff(groups, prepend=-1))
        sizes = np.diff(begins, append=len(groups))
        group = int(np.gcd.reduce(sizes))
        return cls(order, group, groups[::group])


@dataclass(frozen=True, eq=False)
class QuantisedTensor:
    """A weight of few bits in a checkpoint; all axes but the last count as rows.

    Attributes:
        name: name of the weight, as a checkpoint that is not quantised has it.
        shape: its shape.
        code: name in `pallas_kernels.formats.few_bits.CODES`, or of another encoding with `numbers`, which is widened.
        rows: reads its parts.
        groups: the file's group of each column.
        has_zeros: whether `rows` has zero points.
        transposed: whether the last two axes are exchanged relative to the family's rules.
        rounds_rows: whether products with it are meant to round activations, see `Scheme`.
        numbers: the number of each code, if the file has them; `None` for those of `code`.
    """

    name: str
    shape: tuple[int, ...]
    code: str
    rows: Rows
    groups: Int[np.ndarray, " columns"]
    has_zeros: bool = False
    transposed: bool = False
    rounds_rows: bool = False
    numbers: Float[np.ndarray, " codes"] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(tensor.nbytes for tensor in self.rows.tensors)

    @property
    def path(self) -> Path:
        """Path of the file, for error messages."""
        return self.rows.tensors[0].path

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.code in ("float8_e4m3fn", "int8") else 4

    @cached_property
    def columns(self) -> Columns:
        """The columns as `FewBits` has them."""
        return Columns.of(self.groups)

    def equals(self, other: object) -> bool:
        """Whether both have the same stored numbers and groups."""
        return (
            isinstance(other, QuantisedTensor)
            and self.code == other.code
            and np.array_equal(self.groups, other.groups)
            and len(self.rows.tensors) == len(other.rows.tensors)
            and all(
                mine.equals(its)
                for mine, its in zip(self.rows.tensors, other.rows.tensors, strict=True)
            )
        )

    def stored_codes(self, first: int, count: int) -> Shaped[np.ndarray, "rows stored"]:
        """Returns rows of `FewBits.codes`."""
        codes = self._checked_codes(first, count)
        if self.columns.order is not None:
            codes = codes[:, self.columns.order]
        if self.bits == 4:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return codes.view(STORED[self.code])

    def stored_scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        """Returns rows of `FewBits.scales`."""
        return self._checked_scales(first, count)[:, self.columns.stored]

    def stored_zeros(self, first: int, count: int) -> UInt8[np.ndarray, "rows groups"]:
        """Returns rows of `FewBits.zeros`, also for a weight without zero points; int4 alone has them."""
        zeros = self.rows.zeros(first, count)
        if zeros is None:
            return np.full((count, len(self.columns.stored)), 8, np.uint8)
        return zeros[:, self.columns.stored].astype(np.uint8)

    def read(self, target: Float[np.ndarray, " elements"], first: int = 0) -> None:
        """Fills `target` with dequantised rows in order: products in float32, rounded once to the target's dtype.

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
            values = self._widened(first // columns + begin, len(piece))
            with np.errstate(over="ignore", under="ignore"):
                np.copyto(piece, values, casting="unsafe")
            if not all_finite(piece.reshape(-1)):
                raise BadCheckpoint(
                    f"{self.path}: {self.name!r} holds a NaN or a number too large for {piece.dtype.name}"
                )

    def _widened(self, first: int, count: int) -> Float[np.ndarray, "rows columns"]:
        table = _NUMBERS[self.code] if self.numbers is None else self.numbers
        values = np.take(table, self._checked_codes(first, count))
        scales = self._checked_scales(first, count).astype(np.float32)
        zeros = self.rows.zeros(first, count)
        if zeros is not None:
            values -= np.take(zeros.astype(np.float32), self.groups, axis=1)
        elif self.code == "int4":
            values -= np.float32(8)
        with np.errstate(over="ignore", under="ignore"):
            # A scale for each row, or one for all of them, needs no copy for each column.
            values *= scales if scales.shape[1] == 1 else np.take(scales, self.groups, axis=1)
        return values

    def _checked_codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        codes = self.rows.codes(first, count)
        if self.code == "float8_e4m3fn" and np.any((codes & 0x7F) == 0x7F):
            raise BadCheckpoint(f"{self.path}: {self.name!r} holds a NaN")
        return codes

    def _checked_scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        scales = self.rows.scales(first, count)
        # The last exponent is NaN.
        finite = scales.view(np.uint8) != 255 if scales.dtype == E8M0 else np.isfinite(scales)
        if not np.all(finite):
            # Weights that are rounded as they are read have no tensor of scales.
            name = self.rows.tensors[min(1, len(self.rows.tensors) - 1)].name
            raise BadCheckpoint(f"{self.path}: {name!r} holds a NaN or an infinity")
        return scales


def bytes_of(tensor: StoredTensor, begin: int, count: int) -> UInt8[np.ndarray, " bytes"]:
    """Returns `count` bytes of a tensor."""
    raw = np.empty(count, np.uint8)
    tensor.read_bytes(raw, tensor.start + begin)
    return raw


def rows_of(
    tensor: StoredTensor, dtype: np.dtype, first: int, count: int
) -> Shaped[np.ndarray, "rows columns"]:
    """Returns rows of a stored tensor as they are; all axes but the last count as rows."""
    width = tensor.shape[-1] * dtype.itemsize
    return bytes_of(tensor, first * width, count * width).view(dtype).reshape(count, -1)


def columns_of(
    tensor: StoredTensor, dtype: np.dtype, first: int, count: int
) -> Shaped[np.ndarray, "rows columns"]:
    """Returns columns of a stored matrix as they are; only their bytes are read."""
    height, width = tensor.shape
    if count == width:
        return rows_of(tensor, dtype, 0, height)
    raw = np.empty((height, count), dtype)
    size = dtype.itemsize
    for row in range(height):
        tensor.read_bytes(raw[row].view(np.uint8), tensor.start + (row * width + first) * size)
    return raw


def unpacked(words: UInt8[np.ndarray, "... bytes"], bits: int) -> UInt8[np.ndarray, "... codes"]:
    """Returns the codes of bytes along the last axis; of two codes in a byte, that of the lower half first."""
    if bits == 8:
        return words
    return np.stack((np.take(_LOW, words), np.take(_HIGH, words)), axis=-1).reshape(
        *words.shape[:-1], -1
    )


def even_groups(
    tensor: StoredTensor, columns: int, count: int, configured: Collection[int]
) -> Int[np.ndarray, " columns"]:
    """Returns the group of each column, of `count` groups of adjacent columns.

    Args:
        tensor: the scales, for error messages.
        columns: number of columns.
        count: number of groups.
        configured: columns of a group in the config, of which the last group of a row may have fewer; several if it
            has groups of several sizes, none for whole rows.

    Raises:
        BadCheckpoint: there are not that many groups, nor do they divide the columns, or several sizes give as many.
    """
    fitting = sorted({size for size in configured if -(-columns // size) == count})
    if len(fitting) > 1 and count > 1:
        raise BadCheckpoint(
            f"{tensor.path}: {clip(repr(tensor.name))} has {count} groups for {columns} columns, which may be of "
            f"{' or '.join(map(str, fitting))} columns by the config"
        )
    if fitting:
        return np.arange(columns) // fitting[-1]
    if not count or columns % count:
        raise BadCheckpoint(
            f"{tensor.path}: {clip(repr(tensor.name))} has {count} groups for {columns} columns"
        )
    return np.arange(columns) // (columns // count)


def scale_dtype(tensor: StoredTensor) -> np.dtype:
    """Returns the dtype in which scales are kept; JAX has no float64 unless it is turned on."""
    stored = {**FLOAT_DTYPES, "F8_E8M0": E8M0}[tensor.dtype]
    return np.dtype(np.float32) if stored == np.float64 else stored


def check(
    tensor: StoredTensor, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]
) -> None:
    """Raises `BadCheckpoint` unless a tensor has one of these shapes and dtypes."""
    if tensor.shape not in shapes or tensor.dtype not in dtypes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise BadCheckpoint(
            f"{tensor.path}: {clip(repr(tensor.name))} is {tensor.dtype} {list(tensor.shape)}, wanted "
            f"{' or '.join(dtypes)} {wanted}"
        )


SCALES = (*FLOAT_DTYPES, "F8_E8M0")
"""Dtypes of scales in files."""


def read_scales(
    tensor: StoredTensor, raw: Shaped[np.ndarray, "*shape"]
) -> Shaped[np.ndarray, "*shape"]:
    """Returns scales in the dtype in which they are kept."""
    wanted = scale_dtype(tensor)
    return raw if raw.dtype == wanted else raw.astype(wanted)


def file_dtype(tensor: StoredTensor) -> np.dtype:
    """Returns the dtype of a file's scales."""
    return {**FLOAT_DTYPES, "F8_E8M0": E8M0}[tensor.dtype]

"""Reads the `pack-quantized` weights of compressed-tensors: integers of 4 or 8 bits, packed along the columns.

`weight_packed` is int32 [out, in * bits / 32], the first column in the lowest bits; a code is the integer plus
2**(bits - 1). `weight_scale` is [out, groups], `weight_zero_point` int32 packed along the rows, `weight_shape` the
shape, and `weight_g_idx` the group of each column if columns were ordered by importance.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.quantised.quantised_tensor import (
    SCALES,
    QuantisedTensor,
    check,
    even_groups,
    file_dtype,
    read_scales,
    rows_of,
    scale_dtype,
    unpacked,
)
from jaxkv.weights.quantised.scheme import Scheme
from jaxkv.weights.safetensors import StoredTensor
from jaxkv.wording import clip

_WORD = np.dtype("<i4")
_SUFFIX = "_packed"


@dataclass(frozen=True)
class _Rows:
    tensors: tuple[StoredTensor, ...]
    bits: int
    columns: int

    @property
    def scale_dtype(self) -> np.dtype:
        return scale_dtype(self.tensors[1])

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        words = rows_of(self.tensors[0], _WORD, first, count).view(np.uint8)
        codes = unpacked(words, self.bits)[:, : self.columns]
        return codes ^ np.uint8(0x80) if self.bits == 8 else codes

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        scales = self.tensors[1]
        return read_scales(scales, rows_of(scales, file_dtype(scales), first, count))

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        if len(self.tensors) < 3:
            return None
        each = 32 // self.bits
        top = first // each
        words = rows_of(self.tensors[2], _WORD, top, (first + count - 1) // each + 1 - top)
        codes = unpacked(np.ascontiguousarray(words.T).view(np.uint8), self.bits).T
        codes = codes[first - top * each :][:count].astype(np.int32)
        return codes - 128 if self.bits == 8 else codes


def read(
    name: str, tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> tuple[QuantisedTensor, tuple[str, ...]] | None:
    """Returns the weight whose packed codes have this name and the names of its tensors; `None` if it is none.

    Raises:
        BadCheckpoint: a shape or dtype contradicts the format.
    """
    weight = name.removesuffix(_SUFFIX)
    parts = {
        end: tensors.get(f"{weight}_{end}") for end in ("scale", "shape", "zero_point", "g_idx")
    }
    packed, scales, shape = tensors[name], parts["scale"], parts["shape"]
    if weight == name or scales is None or shape is None:
        return None
    check(shape, ((2,),), ("I64", "I32"))
    check(packed, (packed.shape[:2],), ("I32",))
    stored = np.dtype("<i8") if shape.dtype == "I64" else _WORD
    rows, columns = (int(side) for side in rows_of(shape, stored, 0, 1)[0])
    bits = _bits(packed, rows, columns)
    if len(scales.shape) != 2 or not 0 < scales.shape[1] <= columns:
        check(scales, ((rows, 1),), SCALES)
    check(scales, ((rows, scales.shape[1]),), SCALES)
    groups = even_groups(scales, columns, scales.shape[1], scheme.group_sizes)
    zeros, places = parts["zero_point"], parts["g_idx"]
    if places is not None:
        groups = _places(places, columns, scales.shape[1], groups)
    read_from = [packed, scales]
    if zeros is not None:
        check(zeros, ((-(-rows * bits // 32), scales.shape[1]),), ("I32",))
        read_from.append(zeros)
    source = _Rows(tuple(read_from), bits, columns)
    made = QuantisedTensor(
        weight, (rows, columns), f"int{bits}", source, groups, has_zeros=zeros is not None
    )
    return made, (name, *(part.name for part in parts.values() if part is not None))


def _bits(packed: StoredTensor, rows: int, columns: int) -> int:
    for bits in (4, 8):
        if packed.shape == (rows, -(-columns * bits // 32)):
            return bits
    raise BadCheckpoint(
        f"{packed.path}: {clip(repr(packed.name))} has shape {list(packed.shape)}, which is not that of 4 or 8 bits "
        f"for {[rows, columns]}"
    )


def _places(
    places: StoredTensor, columns: int, groups: int, plain: Int[np.ndarray, " columns"]
) -> Int[np.ndarray, " columns"]:
    """Returns the group of each column; -1 in the file means that it was not ordered."""
    check(places, ((columns,),), ("I32",))
    read = rows_of(places, _WORD, 0, 1)[0].astype(np.int64)
    if np.all(read == -1):
        return plain
    if read.min() < 0 or read.max() >= groups:
        raise BadCheckpoint(
            f"{places.path}: {clip(repr(places.name))} has groups from {read.min()} to {read.max()}, wanted 0 to "
            f"{groups - 1}"
        )
    return read

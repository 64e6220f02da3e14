"""Reads weights of GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel store them: 4 or 8 bits, packed along inputs.

`qweight` is int32 [in * bits / 32, out], the first input in the lowest bits; `qzeros` int32 [groups, out * bits / 32];
`scales` [groups, out]; `g_idx` the group of each input. The first version stores zero points less one, of whole words.
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
    columns_of,
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

_WORD = np.dtype("<u4")
_SUFFIX = ".qweight"
_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}


@dataclass(frozen=True, eq=False)
class _Rows:
    tensors: tuple[StoredTensor, ...]
    bits: int
    all_zeros: Int[np.ndarray, "groups rows"] | None

    @property
    def scale_dtype(self) -> np.dtype:
        return scale_dtype(self.tensors[1])

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        words = np.ascontiguousarray(columns_of(self.tensors[0], _WORD, first, count).T)
        codes = unpacked(words.view(np.uint8), self.bits)
        return codes ^ np.uint8(0x80) if self.bits == 8 else codes

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        scales = self.tensors[1]
        return read_scales(scales, columns_of(scales, file_dtype(scales), first, count).T)

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        return None if self.all_zeros is None else self.all_zeros[:, first : first + count].T


def read(
    name: str, tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> tuple[QuantisedTensor, tuple[str, ...]] | None:
    """Returns the weight whose codes have this name and the names of its tensors; `None` if it is none.

    Raises:
        BadCheckpoint: a shape or dtype contradicts the format, or zero points contradict `Scheme.symmetric`.
    """
    module = name.removesuffix(_SUFFIX)
    parts = {end: tensors.get(f"{module}.{end}") for end in ("scales", "qzeros", "g_idx")}
    words, scales, zeros = tensors[name], parts["scales"], parts["qzeros"]
    if module == name or scales is None or zeros is None:
        return None
    bits = 4 if scheme.code == "int4" else 8
    check(words, (words.shape[:2],), ("I32",))
    columns, rows = words.shape[0] * 32 // bits, words.shape[1]
    count = scales.shape[0] if scales.shape else 0
    check(scales, ((count, rows),), SCALES)
    check(zeros, ((count, -(-rows * bits // 32)),), ("I32",))
    groups = even_groups(scales, columns, count, scheme.group_sizes)
    if parts["g_idx"] is not None:
        groups = _places(parts["g_idx"], columns, count)
    points = _zero_points(zeros, rows, bits, scheme)
    if scheme.symmetric and points is not None:
        raise BadCheckpoint(
            f"{zeros.path}: {clip(repr(zeros.name))} has zero points that are not in the middle, although "
            f"quantization_config says sym; its checkpoint_format may be wrong"
        )
    source = _Rows((words, scales, zeros), bits, points)
    made = QuantisedTensor(
        f"{module}.weight",
        (rows, columns),
        scheme.code,
        source,
        groups,
        has_zeros=points is not None,
    )
    return made, (name, *(part.name for part in parts.values() if part is not None))


def _places(places: StoredTensor, columns: int, groups: int) -> Int[np.ndarray, " columns"]:
    check(places, ((columns,),), ("I32",))
    read = rows_of(places, np.dtype("<i4"), 0, 1)[0].astype(np.int64)
    # Negative groups count from the end, as the indices of PyTorch that they are.
    read = np.where(read < 0, read + groups, read)
    if read.min() < 0 or read.max() >= groups:
        raise BadCheckpoint(
            f"{places.path}: {clip(repr(places.name))} has groups from {read.min()} to {read.max()}, wanted 0 to "
            f"{groups - 1}"
        )
    return read


def _zero_points(
    zeros: StoredTensor, rows: int, bits: int, scheme: Scheme
) -> Int[np.ndarray, "groups rows"] | None:
    """Returns the zero points, of 8 bits relative to 0; `None` if all are in the middle."""
    words = rows_of(zeros, _WORD, 0, zeros.shape[0])
    if scheme.zero_is_one_less:
        words = words + _ONES[bits]
    points = unpacked(words.view(np.uint8), bits)[:, :rows]
    if np.all(points == 1 << (bits - 1)):
        return None
    return points.astype(np.int16) - (128 if bits == 8 else 0)

"""Reads weights of AWQ (Lin et al., 2023) as AutoAWQ stores them for its "gemm" kernel: 4 bits, packed along outputs.

`qweight` is int32 [in, out / 8] and `qzeros` int32 [groups, out / 8]; the codes of a word, from the lowest bits up, are
of its outputs 0, 2, 4, 6, 1, 3, 5 and 7. `scales` is [groups, out].
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from jaxkv.weights.quantised.quantised_tensor import (
    SCALES,
    QuantisedTensor,
    check,
    columns_of,
    even_groups,
    file_dtype,
    read_scales,
    scale_dtype,
    unpacked,
)
from jaxkv.weights.quantised.scheme import Scheme
from jaxkv.weights.safetensors import StoredTensor

_WORD = np.dtype("<u4")
_SUFFIX = ".qweight"
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
"""Place in a word of each of its outputs."""


@dataclass(frozen=True)
class _Rows:
    tensors: tuple[StoredTensor, ...]

    @property
    def scale_dtype(self) -> np.dtype:
        return scale_dtype(self.tensors[1])

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        return np.ascontiguousarray(_outputs(self.tensors[0], first, count).T)

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        scales = self.tensors[1]
        return read_scales(scales, columns_of(scales, file_dtype(scales), first, count).T)

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        return _outputs(self.tensors[2], first, count).T.astype(np.int32)


def _outputs(tensor: StoredTensor, first: int, count: int) -> UInt8[np.ndarray, "packed outputs"]:
    """Returns the codes of `count` outputs from output `first` on."""
    begin, end = first // 8, (first + count - 1) // 8 + 1
    words = columns_of(tensor, _WORD, begin, end - begin)
    codes = unpacked(words.view(np.uint8), 4).reshape(len(words), -1, 8)[..., _PLACES]
    return codes.reshape(len(words), -1)[:, first - 8 * begin :][:, :count]


def read(
    name: str, tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> tuple[QuantisedTensor, tuple[str, ...]] | None:
    """Returns the weight whose codes have this name and the names of its tensors; `None` if it is none.

    Raises:
        BadCheckpoint: a shape or dtype contradicts the format.
    """
    module = name.removesuffix(_SUFFIX)
    scales, zeros = tensors.get(f"{module}.scales"), tensors.get(f"{module}.qzeros")
    words = tensors[name]
    if module == name or scales is None or zeros is None:
        return None
    check(words, (words.shape[:2],), ("I32",))
    columns, rows = words.shape[0], words.shape[1] * 8
    count = scales.shape[0] if scales.shape else 0
    check(scales, ((count, rows),), SCALES)
    check(zeros, ((count, words.shape[1]),), ("I32",))
    groups = even_groups(scales, columns, count, scheme.group_sizes)
    source = _Rows((words, scales, zeros))
    made = QuantisedTensor(
        f"{module}.weight", (rows, columns), "int4", source, groups, has_zeros=True
    )
    return made, (name, scales.name, zeros.name)

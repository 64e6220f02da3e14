"""Reads GPT-OSS's form of MXFP4 (OCP Microscaling Formats 1.0), for experts only.

`*_blocks` is uint8 [experts, outputs, blocks, 16] of e2m1 numbers, two per byte, that of the lower half first;
`*_scales` uint8 [experts, outputs, blocks], an 8-bit exponent per 32 numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.quantised.quantised_tensor import (
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

_SUFFIX = "_blocks"
_BLOCK = 32


@dataclass(frozen=True)
class _Rows:
    tensors: tuple[StoredTensor, ...]

    @property
    def scale_dtype(self) -> np.dtype:
        return E8M0

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        packed = self.tensors[0].shape[2] * 16
        raw = bytes_of(self.tensors[0], first * packed, count * packed)
        return unpacked(raw.reshape(count, packed), 4)

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        return rows_of(self.tensors[1], np.dtype(np.uint8), first, count).view(E8M0)

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        return None


def read(
    name: str, tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> tuple[QuantisedTensor, tuple[str, ...]] | None:
    """Returns the weight whose blocks have this name and the names of its tensors; `None` if it is none.

    Raises:
        BadCheckpoint: a shape or dtype contradicts the format.
    """
    del scheme
    weight = name.removesuffix(_SUFFIX)
    blocks, scales = tensors[name], tensors.get(f"{weight}_scales")
    if weight == name or scales is None:
        return None
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != 16:
        raise BadCheckpoint(
            f"{blocks.path}: {clip(repr(name))} is {blocks.dtype} {list(blocks.shape)}, "
            "wanted U8 [experts, outputs, blocks, 16]"
        )
    check(scales, (blocks.shape[:3],), ("U8",))
    columns = _BLOCK * blocks.shape[2]
    made = QuantisedTensor(
        weight,
        (*blocks.shape[:2], columns),
        "float4_e2m1fn",
        _Rows((blocks, scales)),
        np.arange(columns) // _BLOCK,
        transposed=True,
    )
    return made, (name, scales.name)

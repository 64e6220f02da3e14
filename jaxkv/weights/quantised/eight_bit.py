"""Reads `weight` of 8 bits beside its `weight_scale`: compressed-tensors, ModelOpt, fbgemm_fp8, DeepSeek's block fp8.

A weight is the product of number and scale; the scale is one for the matrix, for a row, for a group of columns, or for
a block of rows and columns, of which those at the edges may be smaller. DeepSeek calls it `weight_scale_inv`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.quantised.quantised_tensor import (
    SCALES,
    QuantisedTensor,
    check,
    file_dtype,
    read_scales,
    rows_of,
    scale_dtype,
)
from jaxkv.weights.quantised.scheme import Scheme
from jaxkv.weights.safetensors import StoredTensor
from jaxkv.wording import clip

_CODES = {"F8_E4M3": "float8_e4m3fn", "I8": "int8"}


@dataclass(frozen=True)
class _Rows:
    """Reads rows of 8 bits, whose scales each stand for `tall` rows."""

    tensors: tuple[StoredTensor, ...]
    tall: int

    @property
    def scale_dtype(self) -> np.dtype:
        return scale_dtype(self.tensors[1])

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        return rows_of(self.tensors[0], np.dtype(np.uint8), first, count)

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        scales, top = self.tensors[1], first // self.tall
        below = (first + count - 1) // self.tall + 1
        raw = rows_of(scales, file_dtype(scales), top, below - top)
        return read_scales(scales, raw)[np.arange(first, first + count) // self.tall - top]

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        if len(self.tensors) < 3:
            return None
        return rows_of(self.tensors[2], np.dtype(np.int8), first, count).astype(np.int32)


def read(
    name: str, tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> tuple[QuantisedTensor, tuple[str, ...]] | None:
    """Returns the weight whose numbers have this name and the names of its tensors; `None` if it is none.

    Raises:
        BadCheckpoint: a shape or dtype contradicts the format.
    """
    numbers = tensors[name]
    scales = next(
        (tensors[f"{name}{end}"] for end in ("_scale", "_scale_inv") if f"{name}{end}" in tensors),
        None,
    )
    code = _CODES.get(numbers.dtype)
    if scales is None or code is None:
        return None
    if len(numbers.shape) != 2:
        raise BadCheckpoint(
            f"{numbers.path}: {clip(repr(name))} of 8 bits has shape {list(numbers.shape)}, wanted two axes"
        )
    block = _block(numbers.shape, scales, scheme.block)
    groups = np.arange(numbers.shape[1]) // block[1]
    if len(scales.shape) < 2:
        scales = replace(scales, shape=(math.prod(scales.shape), 1))
    parts = [numbers, scales]
    zeros = tensors.get(f"{name}_zero_point")
    if zeros is not None and code == "int8":
        check(zeros, ((numbers.shape[0], int(groups[-1]) + 1),), ("I8",))
        parts.append(zeros)
    rows = _Rows(tuple(parts), block[0])
    made = QuantisedTensor(
        name,
        numbers.shape,
        code,
        rows,
        groups,
        has_zeros=len(parts) > 2,
        rounds_rows=scheme.rounds_rows and code == "float8_e4m3fn",
    )
    return made, tuple(part.name for part in (*parts, *([zeros] if zeros else [])))


def _block(
    shape: tuple[int, ...], scales: StoredTensor, configured: tuple[int, int] | None
) -> tuple[int, int]:
    """Returns rows and columns that share a scale: those of the config, or else by the shape of the scales.

    Beside blocks, a file may have weights with a scale for each row or one for the matrix.
    """
    rows, columns = shape
    single, by_row = ((), (1,), (1, 1)), ((rows,), (rows, 1))
    if configured is not None:
        blocks = (-(-rows // configured[0]), -(-columns // configured[1]))
        if scales.shape == blocks or scales.shape not in (*single, *by_row):
            check(scales, (blocks,), SCALES)
            return configured
    if scales.shape in single:
        block, shapes = (rows, columns), single
    elif len(scales.shape) == 2 and scales.shape[1] > 1 and columns % scales.shape[1] == 0:
        block, shapes = (1, columns // scales.shape[1]), ((rows, scales.shape[1]),)
    else:
        block, shapes = (1, columns), by_row
    check(scales, shapes, SCALES)
    return block

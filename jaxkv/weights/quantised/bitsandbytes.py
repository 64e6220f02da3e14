"""Reads what bitsandbytes writes: matrices in NF4 or FP4 (Dettmers et al., QLoRA), and in int8 (LLM.int8()).

In 4 bits a matrix is one run of codes, two per byte, the first in the upper half. `weight.quant_map` has the number of
each code, and `weight.absmax` the scale of each block of consecutive codes, in float32 or itself as codes of 8 bits:
numbers of `weight.nested_quant_map`, each times the `weight.nested_absmax` of its own block, plus an offset. A JSON
object in `weight.quant_state.bitsandbytes__nf4` has shape, blocks and offset. In int8 `SCB` is the largest magnitude of
each row, of which 127 is the code.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Shaped, UInt8

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.quantised.quantised_tensor import QuantisedTensor, bytes_of, check, rows_of
from jaxkv.weights.quantised.scheme import Scheme
from jaxkv.weights.safetensors import StoredTensor
from jaxkv.wording import clip

_STATE = ".quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")
_FLOAT, _BYTE = np.dtype(np.float32), np.dtype(np.uint8)
_LARGEST_BLOCK, _LARGEST_STATE = 2**16, 2**12


class _State(NamedTuple):
    """The JSON object of a matrix in 4 bits."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float


@dataclass(frozen=True)
class _FourBits:
    """Reads rows of a run of codes; a group is what a row has of a block, or a part of it."""

    tensors: tuple[StoredTensor, ...]
    state: _State
    group: int

    @property
    def scale_dtype(self) -> np.dtype:
        return _FLOAT

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        columns = self.state.shape[1]
        begin, end = first * columns, (first + count) * columns
        octets = bytes_of(self.tensors[0], begin // 2, -(-end // 2) - begin // 2)
        run = np.stack((octets >> 4, octets & 15), axis=-1).reshape(-1)
        return run[begin % 2 :][: end - begin].reshape(count, columns)

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        columns, block = self.state.shape[1], self.state.block
        begins = np.arange(first * columns, (first + count) * columns, self.group)
        blocks = begins // block
        found = self._block_scales(int(blocks[0]), int(blocks[-1]) + 1 - int(blocks[0]))
        return found[blocks - blocks[0]].reshape(count, -1)

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        return None

    def _block_scales(self, first: int, count: int) -> Float32[np.ndarray, " blocks"]:
        """Returns the scales of consecutive blocks."""
        scales, *nested = self.tensors[1:]
        if not nested:
            return bytes_of(scales, 4 * first, 4 * count).view(_FLOAT)
        numbers, factors = nested
        codes = bytes_of(scales, first, count)
        each = np.arange(first, first + count) // self.state.nested_block
        own = bytes_of(factors, 4 * int(each[0]), 4 * (int(each[-1] - each[0]) + 1)).view(_FLOAT)
        table = bytes_of(numbers, 0, 4 * 256).view(_FLOAT)
        return table[codes] * own[each - each[0]] + np.float32(self.state.offset)


@dataclass(frozen=True)
class _Int8:
    tensors: tuple[StoredTensor, ...]

    @property
    def scale_dtype(self) -> np.dtype:
        return _FLOAT

    def codes(self, first: int, count: int) -> UInt8[np.ndarray, "rows columns"]:
        return rows_of(self.tensors[0], _BYTE, first, count)

    def scales(self, first: int, count: int) -> Shaped[np.ndarray, "rows groups"]:
        largest = bytes_of(self.tensors[1], 4 * first, 4 * count).view(_FLOAT)
        return (largest / np.float32(127))[:, None]

    def zeros(self, first: int, count: int) -> Int[np.ndarray, "rows groups"] | None:
        return None


def read(
    name: str, tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> tuple[QuantisedTensor, tuple[str, ...]] | None:
    """Returns the weight whose codes have this name and the names of its tensors; `None` if it is none.

    Raises:
        BadCheckpoint: a shape or dtype contradicts the format.
    """
    del scheme
    module = name.removesuffix(".weight")
    if module == name:
        return None
    if f"{name}.absmax" in tensors:
        return _read_four_bits(name, tensors)
    return _read_int8(name, module, tensors) if f"{module}.SCB" in tensors else None


def _read_int8(
    name: str, module: str, tensors: Mapping[str, StoredTensor]
) -> tuple[QuantisedTensor, tuple[str, ...]]:
    codes, largest = tensors[name], tensors[f"{module}.SCB"]
    if len(codes.shape) != 2:
        raise BadCheckpoint(
            f"{codes.path}: {clip(repr(name))} of 8 bits has shape {list(codes.shape)}, wanted two axes"
        )
    check(codes, (codes.shape,), ("I8",))
    rows, columns = codes.shape
    check(largest, ((rows,),), ("F32",))
    layout = tensors.get(f"{module}.weight_format")
    if layout is not None:
        check(layout, ((), (1,)), ("U8",))
        if bytes_of(layout, 0, 1).any():
            raise BadCheckpoint(
                f"{layout.path}: {clip(repr(layout.name))} is not 0, so the rows of {clip(repr(name))} are not one "
                "after another; save the model again with a newer bitsandbytes"
            )
    made = QuantisedTensor(
        name, (rows, columns), "int8", _Int8((codes, largest)), np.zeros(columns, int)
    )
    used = (name, largest.name, *([layout.name] if layout is not None else []))
    return made, used


def _read_four_bits(
    name: str, tensors: Mapping[str, StoredTensor]
) -> tuple[QuantisedTensor, tuple[str, ...]]:
    codes, scales = tensors[name], tensors[f"{name}.absmax"]
    stored = {kind: tensors.get(f"{name}{_STATE}{kind}") for kind in _TYPES}
    kind = next((kind for kind, tensor in stored.items() if tensor is not None), None)
    if kind is None:
        raise BadCheckpoint(
            f"{codes.path}: {clip(repr(name))} has scales of bitsandbytes, and there is no {clip(repr(name + _STATE))}"
            f"{' or '.join(_TYPES)}"
        )
    described = stored[kind]
    assert described is not None, "it was found"
    state = _state_of(described)
    count = math.prod(state.shape)
    check(codes, ((-(-count // 2), 1),), ("U8",))
    numbers = _part(name, "quant_map", tensors)
    check(numbers, ((16,),), ("F32",))
    blocks = -(-count // state.block)
    parts, used = [codes, scales], [numbers, described]
    if scales.dtype == "U8":
        nested = [_part(name, f"nested_{end}", tensors) for end in ("quant_map", "absmax")]
        check(nested[0], ((256,),), ("F32",))
        check(nested[1], ((-(-blocks // state.nested_block),),), ("F32",))
        parts += nested
    check(scales, ((blocks,),), ("F32", "U8"))
    group = math.gcd(state.shape[1], state.block)
    made = QuantisedTensor(
        name,
        state.shape,
        kind,
        _FourBits(tuple(parts), state, group),
        np.arange(state.shape[1]) // group,
        numbers=bytes_of(numbers, 0, 4 * 16).view(_FLOAT),
    )
    return made, tuple(part.name for part in (*parts, *used))


def _part(name: str, end: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    part = f"{name}.{end}"
    if part not in tensors:
        raise BadCheckpoint(
            f"{tensors[name].path}: {clip(repr(name))} is of bitsandbytes, and there is no {clip(repr(part))}"
        )
    return tensors[part]


def _state_of(tensor: StoredTensor) -> _State:
    """Reads the JSON object of a matrix; it comes from an untrusted file."""
    check(tensor, (tensor.shape[:1],), ("U8",))
    try:
        if tensor.nbytes > _LARGEST_STATE:
            raise ValueError(f"it has {tensor.nbytes} bytes")
        found = json.loads(bytes_of(tensor, 0, tensor.nbytes).tobytes())
        rows, columns = (_size(side) for side in found["shape"])
        offset = float(found.get("nested_offset", 0.0))
        nested = _size(found.get("nested_blocksize", 1))
        block = _size(found["blocksize"])
        if block > _LARGEST_BLOCK or nested > _LARGEST_BLOCK or not math.isfinite(offset):
            raise ValueError("a block or the offset is out of range")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(
            f"{tensor.path}: {clip(repr(tensor.name))} does not describe a matrix of bitsandbytes: "
            f"{clip(str(error), 80)}"
        ) from error
    return _State((rows, columns), block, nested, offset)


def _size(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no size")
    return value

"""Writes a checkpoint with projections and experts in 8 or 4 bits, in the format of compressed-tensors.

Tensors are written one after the other, a few rows at a time, so that the host holds no whole one.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv.weights import directory as files
from jaxkv.weights.load import Loadable, plan_leaves, rounded_plan
from jaxkv.weights.quantised.quantised_tensor import QuantisedTensor
from jaxkv.weights.rules import RuleSet
from jaxkv.weights.safetensors import INDEX, SINGLE, StoredTensor, open_checkpoint

SHARD_BYTES = 4 * 2**30
"""Most bytes of a file, unless a single tensor is larger."""

_CHUNK_BYTES = 32 * 2**20
_BESIDE = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".md")
"""Ends of the names of files beside the weights that are copied."""

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}

_BY_TOKEN = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
"""Activations that are rounded to fp8 while a model runs, with a scale per token (FP8_DYNAMIC)."""


class _Entry(NamedTuple):
    """One tensor of the new checkpoint.

    Attributes:
        name: its name.
        dtype: safetensors' name of its dtype.
        shape: its shape.
        nbytes: its size.
        pieces: yields its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterator[bytes]]


def write_rounded(
    source: Path,
    target: Path,
    model: Loadable,
    rules: RuleSet,
    *,
    dtype: str,
    quantization: str,
) -> str:
    """Writes the rounded checkpoint of a plain one, and the files beside its weights; config.json comes last.

    Args:
        source: directory of the plain checkpoint.
        target: the new directory.
        model: the model, which tells what is rounded.
        rules: which tensors make up which parameter.
        dtype: dtype name to compute in.
        quantization: name in `ROUNDINGS`.

    Returns:
        One line on what was written.

    Raises:
        FileExistsError: the target is there already.
        BadCheckpoint: the checkpoint is damaged or does not fit the model.
    """
    config = files.read_config_json(source)
    with open_checkpoint(source) as stored:
        plans, _ = plan_leaves(stored, model, rules, dtype, source)
        rounded = {
            one.name: one
            for plan in plans
            for one in rounded_plan(plan, model, quantization).sources
            if isinstance(one, QuantisedTensor) and _fits(one)
        }
        entries = [
            entry
            for name, tensor in stored.items()
            for entry in (_of_rounded(rounded[name]) if name in rounded else [_of_plain(tensor)])
        ]
        if os.path.lexists(target):
            raise FileExistsError(f"{target} is there already; give the name of a new directory")
        target.mkdir(parents=True)
        for name in sorted(os.listdir(source)):
            if name.endswith(_BESIDE) and name not in (files.CONFIG, INDEX):
                shutil.copyfile(files.path_inside(source, name), target / name)
        _write(target, entries)
        plain = [
            name.removesuffix(".weight")
            for name, tensor in stored.items()
            if name not in rounded and name.endswith(".weight") and len(tensor.shape) == 2
        ]
    section = _quantization_config(list(rounded.values()), sorted({"lm_head", *plain}))
    text = json.dumps(config | {"quantization_config": section}, indent=2)
    (target / files.CONFIG).write_text(text + "\n", encoding="utf-8")
    total = sum(entry.nbytes for entry in entries)
    return f"{target}: {len(rounded)} of {len(stored)} tensors in {quantization}, {total:,} bytes of weights"


def _fits(tensor: QuantisedTensor) -> bool:
    """Whether the format has a place for a weight: a matrix whose rows fill whole words."""
    whole = tensor.code == "float8_e4m3fn" or tensor.shape[-1] * tensor.bits % 32 == 0
    return len(tensor.shape) == 2 and tensor.name.endswith(".weight") and whole


def _of_plain(tensor: StoredTensor) -> _Entry:
    def pieces() -> Iterator[bytes]:
        for begin in range(0, tensor.nbytes, _CHUNK_BYTES):
            raw = np.empty(min(_CHUNK_BYTES, tensor.nbytes - begin), np.uint8)
            tensor.read_bytes(raw, tensor.start + begin)
            yield raw.tobytes()

    return _Entry(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, pieces)


def _of_rounded(tensor: QuantisedTensor) -> list[_Entry]:
    rows, columns = tensor.shape
    step = max(1, _CHUNK_BYTES // (4 * columns))

    def by_rows(read: Callable[[int, int], np.ndarray]) -> Callable[[], Iterator[bytes]]:
        def pieces() -> Iterator[bytes]:
            for first in range(0, rows, step):
                yield read(first, min(step, rows - first)).tobytes()

        return pieces

    def codes(first: int, count: int) -> np.ndarray:
        read = tensor.stored_codes(first, count).view(np.uint8)
        # A packed integer of 8 bits is stored plus 128.
        return read ^ np.uint8(0x80) if tensor.code == "int8" else read

    groups = len(tensor.columns.stored)
    dtype = tensor.rows.scale_dtype
    scales = _Entry(
        f"{tensor.name}_scale",
        _NAMES[dtype.name],
        (rows, groups),
        rows * groups * dtype.itemsize,
        by_rows(tensor.stored_scales),
    )
    if tensor.code == "float8_e4m3fn":
        numbers = _Entry(tensor.name, "F8_E4M3", tensor.shape, rows * columns, by_rows(codes))
        return [numbers, scales]
    words = columns * tensor.bits // 32
    packed = _Entry(f"{tensor.name}_packed", "I32", (rows, words), rows * words * 4, by_rows(codes))
    shape = struct.pack("<2q", rows, columns)
    return [
        packed,
        scales,
        _Entry(f"{tensor.name}_shape", "I64", (2,), len(shape), lambda: iter((shape,))),
    ]


def _write(target: Path, entries: Sequence[_Entry]) -> None:
    """Writes the tensors into one file, or into several with an index."""
    shards: list[list[_Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + entry.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(entry)
    if len(shards) == 1:
        _write_file(target / SINGLE, shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(target / name, shard)
        weight_map |= {entry.name: name for entry in shard}
    total = sum(entry.nbytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, entries: Sequence[_Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.nbytes]
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
        at += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            file.writelines(entry.pieces())


def _quantization_config(
    rounded: Sequence[QuantisedTensor], plain: Sequence[str]
) -> dict[str, object]:
    """Returns the section of config.json about the weights; rounded weights all have one code."""
    is_float = rounded[0].code == "float8_e4m3fn" if rounded else False
    by_group: dict[int | None, list[str]] = {}
    for tensor in rounded:
        group = None if len(tensor.columns.stored) == 1 else tensor.columns.group
        by_group.setdefault(group, []).append(tensor.name.removesuffix(".weight"))
    groups = {}
    for number, (group, modules) in enumerate(by_group.items()):
        groups[f"group_{number}"] = {
            # With one group, whatever is not ignored is in it.
            "targets": ["Linear"] if len(by_group) == 1 else modules,
            "weights": {
                "num_bits": rounded[0].bits,
                "type": "float" if is_float else "int",
                "symmetric": True,
                "strategy": "channel" if group is None else "group",
                "group_size": group,
                "dynamic": False,
            },
            "input_activations": _BY_TOKEN if rounded[0].rounds_rows else None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if is_float else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(plain),
    }

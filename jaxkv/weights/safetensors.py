"""Reads untrusted safetensors files, single or sharded, and checks everything that they declare.

Data are read with `preadv` rather than mapped, so that a file that becomes shorter raises an error and no SIGBUS.
"""

import contextlib
import math
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

from jaxkv.errors import BadCheckpoint
from jaxkv.weights import directory as files
from jaxkv.weights.conversions import instead_of_weights
from jaxkv.wording import clip, listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 8 * 2**20
MAX_AXES = 8
CHUNK_BYTES = 4 * 2**20
"""Bytes that are read at once and then checked. Smaller ones make threads wait for Python's global lock."""

FLOAT_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_ITEM_BYTES: Mapping[str, int] = {
    **{name: dtype.itemsize for name, dtype in FLOAT_DTYPES.items()},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16"), 2),
    **dict.fromkeys(("U32", "I32"), 4),
    **dict.fromkeys(("U64", "I64", "C64"), 8),
}
# Bits of positive infinity; NaNs of the same sign have larger ones, and all other numbers smaller ones.
_INFINITY: Mapping[np.dtype, np.signedinteger] = {
    FLOAT_DTYPES["F64"]: np.int64(0x7FF0_0000_0000_0000),
    FLOAT_DTYPES["F32"]: np.int32(0x7F80_0000),
    FLOAT_DTYPES["F16"]: np.int16(0x7C00),
    FLOAT_DTYPES["BF16"]: np.int16(0x7F80),
}


@dataclass(frozen=True)
class StoredTensor:
    """The location of one tensor in a file.

    Attributes:
        name: its name in the checkpoint.
        dtype: safetensors' name of its dtype, such as "BF16"; not necessarily a float.
        shape: its shape.
        start: offset of its first byte in the file.
        nbytes: its size in bytes, checked against dtype and shape.
        file: the open file.
        path: path of the file, for error messages.
        transposed: always False; see `QuantisedTensor`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    file: BinaryIO
    path: Path
    transposed: bool = False

    def read(self, target: Float[np.ndarray, " elements"], first: int = 0) -> None:
        """Fills `target` with the tensor's elements from `first` on in row order, cast to the target's dtype.

        Raises:
            BadCheckpoint: the file has become shorter, or a number is not finite before or after the cast.
        """
        stored = FLOAT_DTYPES[self.dtype]
        start = self.start + first * stored.itemsize
        assert (first + target.size) * stored.itemsize <= self.nbytes, (self, first, target.size)
        step = CHUNK_BYTES // stored.itemsize
        same = target.dtype == stored
        scratch = target if same else np.empty(min(step, target.size), stored)
        for begin in range(0, target.size, step):
            piece = target[begin : begin + step]
            chunk = piece if same else scratch[: piece.size]
            self.read_bytes(chunk.view(np.uint8), start + begin * stored.itemsize)
            self._check_finite(chunk, "holds a NaN or an infinity")
            if not same:
                with np.errstate(over="ignore", under="ignore"):
                    piece[...] = chunk.astype(piece.dtype)
                self._check_finite(piece, f"holds a number too large for {piece.dtype.name}")

    def equals(self, other: object) -> bool:
        """Whether both have the same dtype, shape and bytes."""
        if not isinstance(other, StoredTensor):
            return False
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        ours, theirs = (np.empty(min(CHUNK_BYTES, self.nbytes), np.uint8) for _ in range(2))
        for begin in range(0, self.nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self.nbytes - begin)
            self.read_bytes(ours[:size], self.start + begin)
            other.read_bytes(theirs[:size], other.start + begin)
            if not np.array_equal(ours[:size], theirs[:size]):
                return False
        return True

    def read_bytes(self, target: Shaped[np.ndarray, " bytes"], offset: int) -> None:
        """Fills `target` with the bytes of the file from `offset` on."""
        view = memoryview(target)
        while view.nbytes:
            count = os.preadv(self.file.fileno(), [view], offset)
            if count == 0:
                raise BadCheckpoint(f"{self.path} was cut short while {self.name!r} was read")
            view, offset = view[count:], offset + count

    def _check_finite(self, numbers: Float[np.ndarray, " elements"], complaint: str) -> None:
        if not all_finite(numbers):
            raise BadCheckpoint(f"{self.path}: {self.name!r} {complaint}")


def all_finite(numbers: Float[np.ndarray, "*shape"]) -> bool:
    """Whether all numbers are finite."""
    if not numbers.size:
        return True
    # The largest integer with a sign is the largest positive number, and without one that of the negative numbers,
    # if there are any. Two searches need no memory, whose page faults cost more, and hold Python's lock least.
    infinity = _INFINITY[numbers.dtype]
    signed = numbers.view(infinity.dtype)
    unsigned = signed.view(f"u{infinity.itemsize}")
    negative = int(infinity) + (1 << (8 * infinity.itemsize - 1))
    return bool(signed.max() < infinity) and int(unsigned.max()) < negative


@contextlib.contextmanager
def open_checkpoint(directory: Path) -> Iterator[dict[str, StoredTensor]]:
    """Yields name -> tensor of a directory's checkpoint; the files stay open inside the `with`.

    Like Transformers, it uses `model.safetensors` if there is one, otherwise the shards that
    `model.safetensors.index.json` lists. Only headers are read.

    Raises:
        BadCheckpoint: there is no safetensors checkpoint, or a file is malformed.
    """
    shards: Mapping[str, set[str] | None]
    if files.has_file(directory, SINGLE):
        shards = {SINGLE: None}
    elif files.has_file(directory, INDEX):
        shards = read_index(directory)
        check_shards(shards, os.listdir(directory), str(directory))
    else:
        instead = instead_of_weights(os.listdir(directory), str(directory))
        raise BadCheckpoint(f"{directory} holds neither {SINGLE} nor {INDEX}{instead}")
    tensors: dict[str, StoredTensor] = {}
    with contextlib.ExitStack() as stack:
        for shard, wanted in shards.items():
            file = stack.enter_context(files.open_inside(directory, shard))
            declared = read_header(file, directory / shard)
            for name in declared.keys() & tensors.keys():
                twice = f"{tensors[name].path} and {directory / shard}"
                raise BadCheckpoint(f"{twice} both hold {clip(repr(name))}")
            for name in sorted((wanted or set()) - declared.keys()):
                name = clip(repr(name))
                raise BadCheckpoint(f"{directory / shard} lacks {name}, which {INDEX} puts there")
            tensors.update(declared)
        yield tensors


def read_header(file: BinaryIO, path: Path) -> dict[str, StoredTensor]:
    """Returns name -> tensor of a safetensors file, with all bytes checked to be in the file.

    Args:
        file: the file, opened for unbuffered reading.
        path: its path, for error messages.

    Raises:
        BadCheckpoint: the header is malformed, or its tensors do not fill the file exactly.
    """
    size = os.fstat(file.fileno()).st_size
    head = os.pread(file.fileno(), 512, 0)
    files.check_format(head, f"{path}")
    prefix = head[:8]
    if len(prefix) < 8:
        raise BadCheckpoint(f"{path} is too short ({size} bytes) to be a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise BadCheckpoint(
            f"{path} declares a header of {length} bytes; {MAX_HEADER_BYTES} at most"
        )
    if 8 + length > size:
        raise BadCheckpoint(f"{path} has {size} bytes but declares a header of {length}")
    text = files.decode_utf8(os.pread(file.fileno(), length, 8), f"{path}: the header")
    if not text.startswith("{"):
        raise BadCheckpoint(f"{path}: the header does not begin with a brace")
    header = files.parse_json_object(text, f"{path}: the header")
    _check_metadata(header.pop("__metadata__", {}), path)
    tensors = {
        name: _parse_entry(name, entry, file, path, 8 + length, size)
        for name, entry in header.items()
    }
    _check_coverage(tensors, path, 8 + length, size)
    return tensors


def _check_metadata(metadata: object, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise BadCheckpoint(f"{path}: __metadata__ does not map names to text")


def _parse_entry(
    name: str, entry: object, file: BinaryIO, path: Path, data_start: int, size: int
) -> StoredTensor:
    where = f"{path}: {clip(repr(name))}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadCheckpoint(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise BadCheckpoint(f"{where} has an unknown dtype {clip(repr(dtype), 40)}")
    if not _are_counts(shape) or len(shape) > MAX_AXES:
        raise BadCheckpoint(f"{where} has a malformed shape {clip(repr(shape), 80)}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise BadCheckpoint(f"{where} has malformed data_offsets {clip(repr(offsets), 80)}")
    begin, end = offsets
    if begin > end or data_start + end > size:
        raise BadCheckpoint(
            f"{where} is declared at bytes {begin} to {end} of {size - data_start}; the file may be cut short"
        )
    wanted = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - begin != wanted:
        raise BadCheckpoint(
            f"{where} has {end - begin} bytes, but {dtype} {shape} takes {clip(wanted, 40)}"
        )
    return StoredTensor(name, dtype, tuple(shape), data_start + begin, wanted, file, path)


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
        for value in values
    )


def _check_coverage(
    tensors: Mapping[str, StoredTensor], path: Path, data_start: int, size: int
) -> None:
    """Raises `BadCheckpoint` unless the tensors fill the file's data without gaps and overlaps."""
    at = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != at:
            kind = "overlaps the one before it" if tensor.start < at else "leaves a gap before it"
            raise BadCheckpoint(f"{path}: {clip(repr(tensor.name))} {kind}")
        at += tensor.nbytes
    if at != size:
        raise BadCheckpoint(f"{path} has {size - at} bytes that no tensor owns")


def read_index(directory: Path) -> dict[str, set[str]]:
    """Returns shard -> names of its tensors, shards sorted by name, of a directory's index; the shards need not exist.

    Raises:
        BadCheckpoint: the index is malformed, or a shard's name is no plain name of a safetensors file.
    """
    weight_map = files.read_json(directory, INDEX).get("weight_map")
    where = directory / INDEX
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{where} has no weight_map of names to shards")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            shown = clip(repr(shard), 80)
            raise BadCheckpoint(f"{where} puts {clip(repr(name))} in {shown}, no safetensors file")
        shards.setdefault(shard, set()).add(name)
    for shard in shards:
        files.check_plain_name(directory, shard)
    return dict(sorted(shards.items()))


def check_shards(shards: Collection[str], there: Collection[str], where: str) -> None:
    """Raises `BadCheckpoint` if one of the shards that an index names is not among the model's files.

    Args:
        shards: their names.
        there: names of the files that there are.
        where: the model, for the message.
    """
    missing = sorted(set(shards) - set(there))
    if missing:
        raise BadCheckpoint(
            f"{where} lacks {listed(missing)}, {len(missing)} of the {len(shards)} files that {INDEX} names, as after "
            f"a download or copy that was cut off: get the missing files"
        )

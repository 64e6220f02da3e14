"""The file format of saved prefixes: safetensors, written unit by unit, so that no second copy of a cache is needed.

Its tensors: the tables of a catalogue, and of each group and role one row of bytes per page or state, with a CRC-32 of
each unit. Its metadata: the model, a checksum of its weights, and the cache's layout, which must all be equal.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxkv.atomic_write import atomic_write, remove_abandoned
from jaxkv.cache.spec import CacheLayout, Group
from jaxkv.errors import BadCheckpoint
from jaxkv.offload.prefix_catalogue import ROOT, Catalogue, CheckpointEntry
from jaxkv.offload.prefix_tables import FORMAT, crc32, table_names
from jaxkv.offload.programs import role_stacks, unit_shapes
from jaxkv.wording import clip, listed, shown

_INTS, _CRCS, _BYTES = "I32", "U32", "U8"
_DTYPES = {_INTS: np.dtype("<i4"), _CRCS: np.dtype("<u4"), _BYTES: np.dtype("u1")}
_ALIGNMENT = 8

Unit = tuple[np.ndarray, ...]
"""A page or state on the host: the arrays of `unit_shapes`."""


@dataclass(frozen=True)
class Identity:
    """The model, weights and layout that saved prefixes belong to; a file of another identity is refused.

    Attributes:
        model: the configuration of the model and what runs it.
        weights: a checksum of its weights; called only where the rest is equal.
        layout: the groups of the cache: layers, page size, shapes and dtypes.
        page_size: tokens per row of the tables.
        vocab_size: token ids of the model.
    """

    model: str
    weights: Callable[[], str]
    layout: CacheLayout
    page_size: int
    vocab_size: int

    def metadata(self) -> dict[str, str]:
        """Returns it as the metadata of a file."""
        return {
            "model": self.model,
            "layout": describe(self.layout),
            "page_size": str(self.page_size),
            "weights": self.weights(),
        }


@dataclass(frozen=True)
class _Tensor:
    """The header's entry of one tensor, and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * _DTYPES[self.dtype].itemsize


def describe(layout: CacheLayout) -> str:
    """Returns the groups of a layout as JSON."""
    groups = [asdict(group) for group in layout.groups]
    for group in groups:
        del group["spec"]["notes"]
    return json.dumps(groups)


def save_file(
    path: str | Path,
    identity: Identity,
    catalogue: Catalogue,
    units: Callable[[str], Iterator[Unit]],
) -> int:
    """Writes a file of prefixes, atomically.

    Args:
        path: a new file, or a regular file to replace. Of a symbolic link, the target is replaced and the link stays.
        identity: what the pages and states depend on.
        catalogue: the tables.
        units: yields the units of a group in the catalogue's order.

    Returns:
        The bytes of the file.

    Raises:
        ValueError: `path` exists and is no regular file.
        OSError: it cannot be written; a file that was there is as it was.
    """
    path = _regular(Path(path), "name a file to write prefixes to")
    tables = _tables(catalogue)
    metadata = {
        "format": FORMAT,
        **identity.metadata(),
        "tables_crc32": str(crc32(tables.values())),
    }
    header, tensors = _header(metadata, _tensors(identity.layout, catalogue))
    remove_abandoned(path.parent)
    with atomic_write(path) as unfinished, unfinished.open("wb") as file:
        file.write(header)
        for name, table in tables.items():
            _write_at(file, tensors[name].start, table)
        for group in _kept_groups(identity.layout):
            for row, unit in enumerate(units(group.name)):
                by_role = (part for array in unit for part in array)
                parts = [np.ascontiguousarray(part).view(np.uint8) for part in by_role]
                crc = np.array([crc32(parts)], _DTYPES[_CRCS])
                _write_at(file, tensors[_crc_name(group)].start + row * crc.nbytes, crc)
                for role, part in zip(_roles(group), parts, strict=True):
                    start = tensors[f"{group.name}.{role}"].start
                    _write_at(file, start + row * part.nbytes, part)
        size = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=0)
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    return size


@contextmanager
def open_file(path: str | Path, identity: Identity) -> Iterator["PrefixFile"]:
    """Opens a file that `save_file` wrote, and checks its tables.

    Args:
        path: the file.
        identity: what it must have been saved with.

    Raises:
        BadCheckpoint: it is damaged, no file of prefixes, or was saved with another model, other weights or another
            layout.
        FileNotFoundError: there is no such file.
        ValueError: it is no regular file. A pipe would be waited for.
    """
    _regular(Path(path), "name a file that save_prefixes has written")
    try:
        with safe_open(path, framework="numpy") as file:
            yield PrefixFile(path, file, identity)
    except SafetensorError as error:
        raise BadCheckpoint(f"{path} is damaged or no safetensors file: {clip(error)}") from error


class PrefixFile:
    """An open file of prefixes.

    Args:
        path: its path, for messages.
        file: the open file.
        identity: what it must have been saved with.

    Attributes:
        catalogue: its tables.

    Raises:
        BadCheckpoint: as `open_file`.
    """

    def __init__(
        self,
        path: str | Path,
        file: Any,  # noqa: ANN401 - safetensors does not type it
        identity: Identity,
    ) -> None:
        self._path = path
        self._file = file
        self._layout = identity.layout
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise self._bad(f"has format {shown(metadata.get('format'))}, wanted {FORMAT!r}")
        self._check_identity(metadata, identity)
        self.catalogue = self._read_catalogue(metadata, identity)

    def check(self, group: Group, rows: Sequence[int]) -> None:
        """Raises `BadCheckpoint` if the bytes of a unit are not those that were written."""
        crcs = self._file.get_slice(_crc_name(group))
        for row in rows:
            if crc32(self._parts(group, row)) != int(crcs[row : row + 1][0]):
                raise self._bad(f"is damaged: {group.unit} {row} of {group.name!r} has a wrong CRC")

    def read(self, group: Group, row: int) -> Unit:
        """Returns a page or state of a group; `check` it first."""
        parts = iter(self._parts(group, row))
        return tuple(
            np.stack([*islice(parts, shape.shape[0])]).view(shape.dtype).reshape(shape.shape)
            for shape in unit_shapes(group)
        )

    def _parts(self, group: Group, row: int) -> list[np.ndarray]:
        names = (f"{group.name}.{role}" for role in _roles(group))
        return [self._file.get_slice(name)[row : row + 1].reshape(-1) for name in names]

    def _bad(self, problem: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self._path} {problem}")

    def _check_identity(self, metadata: Mapping[str, str], identity: Identity) -> None:
        for name, noun, wanted in (
            ("model", "another model", identity.model),
            ("layout", "another cache layout", describe(identity.layout)),
            ("page_size", "another page size", str(identity.page_size)),
        ):
            got = metadata.get(name, "")
            if got != wanted:
                here, there = _difference(got, wanted)
                raise self._bad(f"was saved with {noun}: got {here}, wanted {there}")
        if metadata.get("weights") != (weights := identity.weights()):
            raise self._bad(
                f"was saved with other weights: got the checksum {shown(metadata.get('weights'))}, wanted {weights!r}"
            )

    def _read_catalogue(self, metadata: Mapping[str, str], identity: Identity) -> Catalogue:
        layout = identity.layout
        tables = {name: self._table(name) for name in _table_names(layout)}
        if metadata.get("tables_crc32") != str(crc32(tables.values())):
            raise self._bad("is damaged: its tables have a wrong CRC")
        catalogue = self._parse(tables, identity)
        wanted = {
            name: (tensor.dtype, tensor.shape)
            for name, tensor in _tensors(layout, catalogue).items()
        }
        found = {name: self._kind(name) for name in self._file.keys()}  # noqa: SIM118 - no mapping
        if found != wanted:
            wrong = sorted(
                name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
            )
            raise self._bad(
                f"does not hold exactly the tensors of its tables; missing, extra or misshaped: [{listed(wrong)}]"
            )
        return catalogue

    def _kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        found = self._file.get_slice(name)
        return str(found.get_dtype()), tuple(found.get_shape())

    def _table(self, name: str) -> np.ndarray:
        if name not in self._file.keys():  # noqa: SIM118 - no mapping
            raise self._bad(f"lacks the table {name!r}")
        dtype, shape = self._kind(name)
        if dtype != _INTS:
            raise self._bad(f"has the table {name!r} as {dtype}{list(shape)}, wanted {_INTS}")
        return self._file.get_tensor(name)

    def _parse(self, tables: Mapping[str, np.ndarray], identity: Identity) -> Catalogue:
        layout, page_size, vocab_size = identity.layout, identity.page_size, identity.vocab_size
        parents, tokens = tables["parents"], tables["tokens"]
        rows, lengths, tails = tables["checkpoint_rows"], tables["tail_lengths"], tables["tails"]
        count, kept = parents.size, rows.size
        pages = {group.name: tables[f"rows.{group.name}"] for group in layout.paged_groups}
        good = (
            parents.shape == (count,)
            and tokens.shape == (count, page_size)
            and rows.shape == lengths.shape == (kept,)
            and tails.shape == (kept, page_size - 1)
            and (kept == 0 or bool(layout.state_groups))
            and _within(parents, ROOT, np.arange(count))
            and _within(tokens, 0, vocab_size)
            and _within(rows, ROOT, count)
            and _within(lengths, 0, page_size)
            and _within(tails, 0, vocab_size)
            and bool(((rows != ROOT) | (lengths > 0)).all())
            and all(
                one.ndim == 1 and _within(one, 0, count) and bool((np.diff(one) > 0).all())
                for one in pages.values()
            )
        )
        if not good:
            raise self._bad("has tables that contradict each other or the model")
        texts = tuple(row.tobytes() for row in tokens)
        entries = tuple(
            CheckpointEntry(row, tail[:length].tobytes())
            for row, length, tail in zip(rows.tolist(), lengths.tolist(), tails, strict=True)
        )
        before = tuple(parents.tolist())
        if len({*zip(before, texts, strict=True)}) != count or len({*entries}) != kept:
            raise self._bad("has the same page or checkpoint twice")
        names = {name: tuple(one.tolist()) for name, one in pages.items()}
        return Catalogue(page_size, before, texts, MappingProxyType(names), entries)


def _within(values: np.ndarray, low: int, high: int | np.ndarray) -> bool:
    return bool(((values >= low) & (values < high)).all())


def _tables(catalogue: Catalogue) -> dict[str, np.ndarray]:
    dtype, size = _DTYPES[_INTS], catalogue.page_size
    tails = np.zeros((len(catalogue.checkpoints), size - 1), dtype)
    for row, one in zip(tails, catalogue.checkpoints, strict=True):
        tail = np.frombuffer(one.tail, dtype)
        row[: len(tail)] = tail
    ends = [len(one.tail) // dtype.itemsize for one in catalogue.checkpoints]
    return {
        "parents": np.array(catalogue.parents, dtype),
        "tokens": np.frombuffer(b"".join(catalogue.tokens), dtype).reshape(-1, size),
        "checkpoint_rows": np.array([one.row for one in catalogue.checkpoints], dtype),
        "tail_lengths": np.array(ends, dtype),
        "tails": tails,
        **{f"rows.{name}": np.array(rows, dtype) for name, rows in catalogue.pages.items()},
    }


def _table_names(layout: CacheLayout) -> tuple[str, ...]:
    return table_names(group.name for group in layout.paged_groups)


def _tensors(layout: CacheLayout, catalogue: Catalogue) -> dict[str, _Tensor]:
    """Returns every tensor of a file: the tables, then each group's units and their CRCs."""
    tensors = {name: _Tensor(_INTS, table.shape) for name, table in _tables(catalogue).items()}
    counts = catalogue.num_units(layout)
    for group in _kept_groups(layout):
        count = counts[group.name]
        tensors[_crc_name(group)] = _Tensor(_CRCS, (count,))
        for stack, shape in zip(role_stacks(group), unit_shapes(group), strict=True):
            row = shape.size // len(stack) * shape.dtype.itemsize
            for array in stack:
                tensors[f"{group.name}.{array.role}"] = _Tensor(_BYTES, (count, row))
    return tensors


def _header(
    metadata: Mapping[str, str], tensors: Mapping[str, _Tensor]
) -> tuple[bytes, dict[str, _Tensor]]:
    """Returns the header of a safetensors file, and its tensors with the places of their bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at, starts = 0, {}
    for name, tensor in tensors.items():
        starts[name], end = at, at + tensor.nbytes
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    placed = {
        name: _Tensor(tensor.dtype, tensor.shape, len(header) + starts[name])
        for name, tensor in tensors.items()
    }
    return header, placed


def _kept_groups(layout: CacheLayout) -> tuple[Group, ...]:
    return (*layout.paged_groups, *layout.state_groups)


def _roles(group: Group) -> tuple[str, ...]:
    return tuple(array.role for array in group.spec.arrays)


def _crc_name(group: Group) -> str:
    return f"{group.name}.crc32"


def _write_at(file: Any, start: int, array: np.ndarray) -> None:  # noqa: ANN401 - an open binary file
    file.seek(start)
    file.write(np.ascontiguousarray(array).tobytes())


def _difference(got: str, wanted: str) -> tuple[str, str]:
    """Returns excerpts of two texts around the place where they begin to differ."""
    pairs = enumerate(zip(got, wanted, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(got), len(wanted)))
    first = max(0, at - 40)
    return shown(got[first : at + 40]), shown(wanted[first : at + 40])


def _regular(path: Path, advice: str) -> Path:
    """Returns the path after following links; raises `ValueError` if it exists and is no regular file.

    Args:
        path: the path.
        advice: what to do instead, for the message.
    """
    real = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        mode = real.stat().st_mode
        if not stat.S_ISREG(mode):
            kinds = {
                stat.S_IFDIR: "a directory",
                stat.S_IFCHR: "a device",
                stat.S_IFBLK: "a device",
            }
            kind = kinds.get(stat.S_IFMT(mode), "a pipe or socket")
            raise ValueError(f"{path} is {kind}, not a regular file; {advice}")
    return real

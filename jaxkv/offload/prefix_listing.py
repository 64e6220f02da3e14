"""Lists what a file of prefixes holds, without a model, a device or JAX. The bytes of pages and states are not read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxkv.errors import BadCheckpoint
from jaxkv.offload.prefix_tables import FORMAT, crc32, table_names
from jaxkv.wording import clip, listed, shown

_ROOT = -1


@dataclass(frozen=True, kw_only=True)
class GroupListing:
    """The units of one group of layers in a file.

    Attributes:
        name: group name.
        unit: "page" or "state".
        depths: page table position of each full page, in the order of the file; empty for states.
        num_tails: pages with the last tokens of a checkpoint, which follow the full pages.
        num_units: all pages or states.
        num_bytes: their bytes.
    """

    name: str
    unit: str
    depths: tuple[int, ...]
    num_tails: int
    num_units: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The contents of a file of prefixes.

    Attributes:
        model: the configuration that it was saved with.
        weights: checksum of the weights.
        page_size: tokens per row of its tables.
        num_rows: distinct full pages of text.
        ends: rows that no row follows.
        deepest: pages of the longest text.
        checkpoints: length in tokens of each checkpoint.
        tails: whether it ends inside a page, for each checkpoint.
        groups: its groups.
        num_bytes: bytes of the file.
    """

    model: str
    weights: str
    page_size: int
    num_rows: int
    ends: int
    deepest: int
    checkpoints: tuple[int, ...]
    tails: tuple[bool, ...]
    groups: tuple[GroupListing, ...]
    num_bytes: int


def list_prefixes(path: str | Path) -> Listing:
    """Returns what a file that `LLM.save_prefixes` wrote holds.

    Args:
        path: the file.

    Raises:
        BadCheckpoint: it is damaged, or no file of prefixes.
        FileNotFoundError: there is no such file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            return _read(Path(path), file)
    except SafetensorError as error:
        raise BadCheckpoint(f"{path} is damaged or no safetensors file: {clip(error)}") from error


def _read(path: Path, file: Any) -> Listing:  # noqa: ANN401 - safetensors does not type it
    metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise BadCheckpoint(
            f"{path} has format {shown(metadata.get('format'))}, wanted {FORMAT!r}; give a file that "
            "LLM.save_prefixes wrote"
        )
    keys = set(file.keys())
    try:
        names = [str(group["name"]) for group in json.loads(metadata["layout"])]
        paged = [name for name in names if f"rows.{name}" in keys]
        tables = {name: file.get_tensor(name) for name in table_names(paged)}
        if metadata["tables_crc32"] != str(crc32(tables.values())):
            raise BadCheckpoint(f"{path} is damaged: its tables have a wrong CRC")
        depths = _depths(tables["parents"])
        lengths = _lengths(tables, depths, int(metadata["page_size"]))
        tails = tuple(bool(length) for length in tables["tail_lengths"].tolist())
        groups = tuple(
            _group(file, name, keys, tables, depths, sum(tails))
            for name in names
            if f"{name}.crc32" in keys
        )
        return Listing(
            model=metadata["model"],
            weights=metadata["weights"],
            page_size=int(metadata["page_size"]),
            num_rows=len(depths),
            ends=len(depths) - len({*tables["parents"].tolist()} - {_ROOT}),
            deepest=max(depths, default=-1) + 1,
            checkpoints=lengths,
            tails=tails,
            groups=groups,
            num_bytes=path.stat().st_size,
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadCheckpoint(
            f"{path} is damaged: its tables or metadata are incomplete or contradict each other: {clip(error)}"
        ) from error


def _depths(parents: np.ndarray) -> tuple[int, ...]:
    """Returns the page table position of each row; a row's parent comes before it."""
    depths: list[int] = []
    for row, parent in enumerate(parents.tolist()):
        if not _ROOT <= parent < row:
            raise ValueError(f"row {row} has the parent {parent}")
        depths.append(0 if parent == _ROOT else depths[parent] + 1)
    return tuple(depths)


def _lengths(
    tables: Mapping[str, np.ndarray], depths: tuple[int, ...], page_size: int
) -> tuple[int, ...]:
    rows, tails = tables["checkpoint_rows"].tolist(), tables["tail_lengths"].tolist()
    _check_rows(rows, _ROOT, len(depths))
    return tuple(
        (0 if row == _ROOT else (depths[row] + 1) * page_size) + tail
        for row, tail in zip(rows, tails, strict=True)
    )


def _check_rows(rows: Sequence[int], low: int, high: int) -> None:
    if wrong := [row for row in rows if not low <= row < high]:
        raise ValueError(f"rows {listed(wrong)} are outside [{low}, {high})")


def _group(
    file: Any,  # noqa: ANN401 - see `_read`
    name: str,
    keys: set[str],
    tables: Mapping[str, np.ndarray],
    depths: tuple[int, ...],
    num_tails: int,
) -> GroupListing:
    paged = f"rows.{name}" in tables
    rows = tables[f"rows.{name}"].tolist() if paged else []
    _check_rows(rows, 0, len(depths))
    places = tuple(depths[row] for row in rows)
    [num_units] = file.get_slice(f"{name}.crc32").get_shape()
    if paged and num_units != len(places) + num_tails:
        raise ValueError(f"{name!r} has {num_units} pages and {len(places) + num_tails} entries")
    parts = [key for key in keys if key.startswith(f"{name}.") and key != f"{name}.crc32"]
    shapes = [file.get_slice(key).get_shape() for key in parts]
    return GroupListing(
        name=name,
        unit="page" if paged else "state",
        depths=places,
        num_tails=num_tails if paged else 0,
        num_units=num_units,
        num_bytes=sum(int(np.prod(shape)) for shape in shapes),
    )

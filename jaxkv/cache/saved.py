"""Saving and loading a cache: a safetensors file with every array, bit for bit, and the layout as metadata."""

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxkv.cache.spec import CacheLayout, NamedArray
from jaxkv.cache.state import Cache
from jaxkv.drafts import draft_of, remove_abandoned
from jaxkv.errors import BadCheckpoint
from jaxkv.wording import clip, listed, shown

_FORMAT = "jaxkv-cache-1"


def _stored_dtype(dtype: str) -> np.dtype:
    """Returns the dtype on disk: uint8 for one-byte floats, which safetensors cannot store from numpy."""
    stored = np.dtype(dtype)
    return np.dtype("uint8") if stored.itemsize == 1 and stored.kind not in "iub" else stored


def _describe(layout: CacheLayout) -> list[dict[str, Any]]:
    groups = [asdict(group) for group in layout.groups]
    for group in groups:
        del group["spec"]["notes"]
    return json.loads(json.dumps(groups))


def save_cache(
    cache: Cache, layout: CacheLayout, counts: Mapping[str, int], path: str | Path
) -> None:
    """Writes every array, bit for bit, and the layout to a safetensors file, atomically.

    Args:
        cache: the cache to write.
        layout: its layout.
        counts: group name -> its number of pages or states.
        path: a new file, or a regular file to replace. Of a symbolic link, the target is replaced and the link stays.

    Raises:
        ValueError: the cache was not made from this layout and these counts, or `path` exists and is no regular file.
        FileNotFoundError: the folder of `path` does not exist.
    """
    named = layout.arrays(counts)
    if [array.shape for array in cache.arrays] != [array.shape for array in named]:
        raise ValueError(
            f"the cache's arrays are not those of this layout with the counts {dict(counts)}; "
            f"give the layout and counts that the cache was made from"
        )
    path = _writable(Path(path))
    metadata = {
        "format": _FORMAT,
        "layout": json.dumps(_describe(layout)),
        "counts": json.dumps(dict(counts)),
    }
    # `np.asarray` of a JAX array leaves a host view of it alive, and a viewed array cannot be donated.
    tensors = {
        name.name: np.asarray(jnp.copy(array)).view(_stored_dtype(name.dtype))
        for name, array in zip(named, cache.arrays, strict=True)
    }
    remove_abandoned(path.parent)
    with draft_of(path) as draft:
        save_file(tensors, draft, metadata=metadata)


def _writable(path: Path) -> Path:
    """Returns the path after following links; raises an error if no regular file can be there."""
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
            raise ValueError(
                f"{path} is {kind}, not a regular file; name a file to write the cache to"
            )
    if not real.parent.is_dir():
        folder = real.parent if path.parent.is_dir() else path.parent
        raise FileNotFoundError(
            f"there is no folder {folder} to save {path.name} in; make it first"
        )
    return real


def load_cache(path: str | Path, layout: CacheLayout) -> tuple[Cache, dict[str, int]]:
    """Reads a file that `save_cache` wrote; returns the cache, and group name -> number of pages or states.

    Raises:
        BadCheckpoint: the file is damaged, was saved with another layout, or lacks an array or has a wrong one.
        FileNotFoundError: there is no such file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            counts = _check_metadata(file.metadata() or {}, layout, path)
            named = layout.arrays(counts)
            names = {array.name for array in named}
            if names != set(file.keys()):
                others = [repr(name) for name in sorted(names ^ set(file.keys()))]
                raise BadCheckpoint(
                    f"{path} does not hold exactly the arrays of its layout; missing or extra: [{listed(others)}]"
                )
            arrays = tuple(_read(array, file.get_tensor(array.name), path) for array in named)
    except SafetensorError as error:
        raise BadCheckpoint(f"{path} is damaged or no safetensors file: {clip(error)}") from error
    return Cache(arrays=arrays, keys=tuple((array.layer, array.role) for array in named)), counts


def _check_metadata(
    metadata: Mapping[str, str], layout: CacheLayout, path: str | Path
) -> dict[str, int]:
    if metadata.get("format") != _FORMAT:
        raise BadCheckpoint(
            f"{path} has format {shown(metadata.get('format'))}, wanted {_FORMAT!r}"
        )
    try:
        saved, counts = json.loads(metadata["layout"]), json.loads(metadata["counts"])
    except (KeyError, json.JSONDecodeError) as error:
        raise BadCheckpoint(f"{path} has no readable layout: {error!r}") from error
    wanted = _describe(layout)
    differing = [pair for pair in zip(saved, wanted, strict=False) if pair[0] != pair[1]]
    if saved != wanted:
        got, want = differing[0] if differing else (f"{len(saved)} groups", f"{len(wanted)} groups")
        raise BadCheckpoint(
            f"{path} was saved with another layout: got {clip(got, 600)}, wanted {clip(want, 600)}"
        )
    names = {group.name for group in layout.groups}
    positive = isinstance(counts, dict) and all(type(n) is int and n > 0 for n in counts.values())
    if not positive or set(counts) != names:
        raise BadCheckpoint(
            f"{path} has counts {clip(counts)}, wanted one for each of {sorted(names)}"
        )
    return counts


def _read(array: NamedArray, stored: np.ndarray, path: str | Path) -> Array:
    wanted = _stored_dtype(array.dtype)
    if (stored.shape, stored.dtype) != (array.shape, wanted):
        raise BadCheckpoint(
            f"{array.name} in {path} is {stored.dtype}{list(stored.shape)}, wanted {wanted}{list(array.shape)}"
        )
    # Copied, because memory shared with numpy cannot be donated.
    return jnp.array(stored.view(np.dtype(array.dtype)), copy=True)

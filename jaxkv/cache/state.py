"""The cache on the device: a pytree of arrays in the layout's total order, and pure functions on it.

Knows nothing of sequences; which ids are in use is `accounts.py`'s business.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Int, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxkv._pytree import pytree, static_field
from jaxkv.cache.spec import CacheLayout, NamedArray
from jaxkv.errors import BadCheckpoint

_FORMAT = "jaxkv-cache-1"
PADDING_HEADROOM = 2**20
"""Slots past the end of a pool that padding may name, as int32, without wrapping."""


@pytree
class Cache:
    """Everything the model remembers. Donate it to each step and keep only what comes back.

    Attributes:
        arrays: one array per key, in the total order (layer, role priority).
        keys: static; (layer, role) of each array.
    """

    arrays: tuple[Array, ...]
    keys: tuple[tuple[int, str], ...] = static_field()

    def layer(self, layer: int) -> dict[str, Array]:
        """Returns the layer's arrays by role, in role order."""
        held = {
            role: array
            for (number, role), array in zip(self.keys, self.arrays, strict=True)
            if number == layer
        }
        if not held:
            raise ValueError(f"the cache has no layer {layer}; it has {self._layers()}")
        return held

    def with_layer(self, layer: int, updates: Mapping[str, Array]) -> "Cache":
        """Returns the cache with some of a layer's arrays replaced, each in its place, so that donation pairs up."""
        arrays = list(self.arrays)
        for role, new in updates.items():
            if (layer, role) not in self.keys:
                raise ValueError(f"layer {layer} has {list(self.layer(layer))}, not {role!r}")
            index = self.keys.index((layer, role))
            old = arrays[index]
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ValueError(
                    f"layer {layer} {role} is {old.dtype}{list(old.shape)} and must stay so, "
                    f"got {new.dtype}{list(new.shape)}"
                )
            arrays[index] = new
        return Cache(arrays=tuple(arrays), keys=self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.size * array.dtype.itemsize for array in self.arrays)

    def _layers(self) -> list[int]:
        return sorted({number for number, _ in self.keys})


def init_cache(
    layout: CacheLayout,
    counts: Mapping[str, int],
    *,
    device: jax.Device | Sharding | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Cache:
    """Allocates every array of the layout, filled with zeros.

    Args:
        layout: the groups.
        counts: pages or states of each group, by name.
        device: where to put the arrays; `None` for JAX's default device.

    Raises:
        ValueError: a group has so many slots that int32 could not name them and their padding.
    """
    for group in layout.groups:
        per_unit = group.page_size if group.unit == "page" else 1
        most = (2**31 - PADDING_HEADROOM) // per_unit
        if counts.get(group.name, 0) > most:
            raise ValueError(
                f"group {group.name!r} would have {counts[group.name]} {group.unit}s of {per_unit} slots, "
                f"but slots are int32, which allows {most}; lower the cache's budget"
            )
    named = layout.arrays(counts)
    for array in named:
        if jax.dtypes.canonicalize_dtype(array.dtype) != np.dtype(array.dtype):
            raise ValueError(
                f"{array.name} would be {array.dtype}, which JAX narrows without a word; choose a narrower dtype"
            )
    arrays = tuple(jnp.zeros(array.shape, array.dtype, device=device) for array in named)
    return Cache(arrays=arrays, keys=tuple((array.layer, array.role) for array in named))


def _copy_units(
    cache: Cache,
    layout: CacheLayout,
    group_name: str,
    source_ids: Int[Array, " copies"],
    target_ids: Int[Array, " copies"],
    *,
    unit: str,
) -> Cache:
    group = layout.group(group_name)
    if group.unit != unit:
        raise ValueError(f"group {group_name!r} holds {group.unit}s, not {unit}s")
    places = {(layer, array.role) for layer in group.layers for array in group.spec.arrays}
    arrays = tuple(
        array.at[target_ids].set(array.at[source_ids].get(mode="clip"), mode="drop")
        if key in places
        else array
        for key, array in zip(cache.keys, cache.arrays, strict=True)
    )
    return Cache(arrays=arrays, keys=cache.keys)


def copy_pages(
    cache: Cache,
    layout: CacheLayout,
    group_name: str,
    source_ids: Int[Array, " copies"],
    target_ids: Int[Array, " copies"],
) -> Cache:
    """Copies whole pages of one group in all its layers; every source is read before any target is written.

    Donate `cache` when jitting. Targets must differ. Padding copy r has target `num_pages + r`, which is dropped,
    and any source that is not negative.
    """
    return _copy_units(cache, layout, group_name, source_ids, target_ids, unit="page")


def copy_states(
    cache: Cache,
    layout: CacheLayout,
    group_name: str,
    source_ids: Int[Array, " copies"],
    target_ids: Int[Array, " copies"],
) -> Cache:
    """Copies states of one group in all its layers, as `copy_pages` does pages. Source 0, the zero state, clears."""
    return _copy_units(cache, layout, group_name, source_ids, target_ids, unit="state")


def identity_table(rows: int, pages_per_row: int = 1) -> Int[Array, "rows pages_per_row"]:
    """Returns the page table of a static cache: row r owns pages `r * pages_per_row` and following."""
    return jnp.arange(rows * pages_per_row, dtype=jnp.int32).reshape(rows, pages_per_row)


def as_static(
    pages: Shaped[Array, "pages page_size ..."], rows: int
) -> Shaped[Array, "rows length ..."]:
    """Views the pages of an identity table as one stretch of tokens per row. Moves no byte under jit."""
    return pages.reshape(rows, -1, *pages.shape[2:])


def as_pages(
    static: Shaped[Array, "rows length ..."], page_size: int
) -> Shaped[Array, "pages page_size ..."]:
    """Views one stretch of tokens per row as pages, the inverse of `as_static`."""
    if static.shape[1] % page_size:
        raise ValueError(
            f"{static.shape[1]} tokens per row are no whole number of pages of {page_size}"
        )
    return static.reshape(-1, page_size, *static.shape[2:])


def _stored_dtype(dtype: str) -> np.dtype:
    """One-byte floats, which safetensors' numpy side cannot name, are stored as their bits."""
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
    """Writes every array, bit for bit, to a safetensors file that names its layout; it appears whole or not at all."""
    named = layout.arrays(counts)
    if [array.shape for array in cache.arrays] != [array.shape for array in named]:
        raise ValueError(f"the cache was not made from this layout and the counts {dict(counts)}")
    metadata = {
        "format": _FORMAT,
        "layout": json.dumps(_describe(layout)),
        "counts": json.dumps(dict(counts)),
    }
    # JAX keeps the host's view of an array it converted, and a viewed array cannot be donated: convert a copy.
    tensors = {
        name.name: np.asarray(jnp.copy(array)).view(_stored_dtype(name.dtype))
        for name, array in zip(named, cache.arrays, strict=True)
    }
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def load_cache(path: str | Path, layout: CacheLayout) -> tuple[Cache, dict[str, int]]:
    """Reads what `save_cache` wrote: the cache, and the pages or states of each group.

    Raises:
        BadCheckpoint: the file is damaged, was saved with another layout, or an array is missing or wrong.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            counts = _check_metadata(file.metadata() or {}, layout, path)
            named = layout.arrays(counts)
            names = {array.name for array in named}
            if names != set(file.keys()):
                raise BadCheckpoint(
                    f"{path} holds other arrays than its layout: {sorted(names ^ set(file.keys()))}"
                )
            arrays = tuple(_read(array, file.get_tensor(array.name), path) for array in named)
    except SafetensorError as error:
        raise BadCheckpoint(f"{path} is damaged or no safetensors file: {error}") from error
    return Cache(arrays=arrays, keys=tuple((array.layer, array.role) for array in named)), counts


def _check_metadata(
    metadata: Mapping[str, str], layout: CacheLayout, path: str | Path
) -> dict[str, int]:
    if metadata.get("format") != _FORMAT:
        raise BadCheckpoint(f"{path} has format {metadata.get('format')!r}, wanted {_FORMAT!r}")
    try:
        saved, counts = json.loads(metadata["layout"]), json.loads(metadata["counts"])
    except (KeyError, json.JSONDecodeError) as error:
        raise BadCheckpoint(f"{path} lacks a readable layout: {error!r}") from error
    wanted = _describe(layout)
    differing = [pair for pair in zip(saved, wanted, strict=False) if pair[0] != pair[1]]
    if saved != wanted:
        got, want = differing[0] if differing else (f"{len(saved)} groups", f"{len(wanted)} groups")
        raise BadCheckpoint(f"{path} was saved with another layout: got {got}, wanted {want}")
    names = {group.name for group in layout.groups}
    positive = isinstance(counts, dict) and all(type(n) is int and n > 0 for n in counts.values())
    if not positive or set(counts) != names:
        raise BadCheckpoint(f"{path} has counts {counts}, wanted one for each of {sorted(names)}")
    return counts


def _read(array: NamedArray, stored: np.ndarray, path: str | Path) -> Array:
    wanted = _stored_dtype(array.dtype)
    if (stored.shape, stored.dtype) != (array.shape, wanted):
        raise BadCheckpoint(
            f"{array.name} in {path} is {stored.dtype}{list(stored.shape)}, wanted {wanted}{list(array.shape)}"
        )
    # A copy of its own: memory shared with numpy could not be donated.
    return jnp.array(stored.view(np.dtype(array.dtype)), copy=True)

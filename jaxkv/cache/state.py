"""The cache on the device: a pytree of arrays in the layout's total order, and pure functions on it.

It knows no sequences; `page_allocator.py` records which ids are in use.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Int

from jaxkv._pytree import pytree, static_field
from jaxkv.cache.spec import CacheLayout

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


def copy_units(
    cache: Cache,
    layout: CacheLayout,
    group_name: str,
    source_ids: Int[Array, " copies"],
    target_ids: Int[Array, " copies"],
) -> Cache:
    """Copies whole pages or states of one group in all its layers; every source is read before any target is written.

    Donate `cache` when jitting. Targets must differ. Padding copy r has target `num_units + r`, which is dropped,
    and any source that is not negative. Source 0 of a group of states, the zero state, clears the target.
    """
    group = layout.group(group_name)
    places = {(layer, array.role) for layer in group.layers for array in group.spec.arrays}
    arrays = tuple(
        array.at[target_ids].set(array.at[source_ids].get(mode="clip"), mode="drop")
        if key in places
        else array
        for key, array in zip(cache.keys, cache.arrays, strict=True)
    )
    return Cache(arrays=arrays, keys=cache.keys)

"""The cache on the device: a pytree of arrays in the layout's order, and pure functions on it.

`page_allocator.py` records which page and state ids are in use.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int

from jaxkv._pytree import pytree, static_field
from jaxkv.cache.spec import CacheLayout, NamedArray

PADDING_HEADROOM = 2**20
"""Slot numbers past the end of a pool that padding may use without overflow of int32."""


@pytree
class Cache:
    """All pages and states of a model. Donate it to each step, and keep only the cache that the step returns.

    Attributes:
        arrays: one array per key, in the layout's order, see `CacheLayout.arrays`.
        keys: (layer, role) of each array; static.
        peers: by which the GPUs of a tensor-parallel model reach each other's mailboxes (`Mailboxes.peers`); `None`
            where XLA adds up all sums over devices. A mailbox holds one sum, so a program must not compute two forward
            passes with the same cache of which neither needs the other's result.
    """

    arrays: tuple[Array, ...]
    keys: tuple[tuple[int, str], ...] = static_field()
    peers: Int[Array, "devices numbers"] | None = None

    def layer(self, layer: int) -> dict[str, Array]:
        """Returns role -> array of one layer, in role order; raises `ValueError` if there is no such layer."""
        by_role = {
            role: array
            for (number, role), array in zip(self.keys, self.arrays, strict=True)
            if number == layer
        }
        if not by_role:
            raise ValueError(f"the cache has no layer {layer}; it has {self._layers()}")
        return by_role

    def with_layer(self, layer: int, updates: Mapping[str, Array]) -> "Cache":
        """Returns the cache with some arrays of a layer replaced. Their order stays the same, so donation still works.

        Args:
            layer: absolute number of the layer.
            updates: role -> new array.

        Raises:
            ValueError: the layer lacks a role, or a new array differs in shape or dtype.
        """
        arrays = list(self.arrays)
        for role, new in updates.items():
            if (layer, role) not in self.keys:
                raise ValueError(
                    f"layer {layer} has the arrays {list(self.layer(layer))}, got {role!r}"
                )
            index = self.keys.index((layer, role))
            old = arrays[index]
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ValueError(
                    f"layer {layer} {role} must stay {old.dtype}{list(old.shape)}, "
                    f"got {new.dtype}{list(new.shape)}"
                )
            arrays[index] = new
        return replace(self, arrays=tuple(arrays))

    def _layers(self) -> list[int]:
        return sorted({number for number, _ in self.keys})


def init_cache(
    layout: CacheLayout,
    counts: Mapping[str, int],
    *,
    device: jax.Device | Sharding | Mesh | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Cache:
    """Allocates every array of the layout, filled with zeros.

    Args:
        layout: the groups.
        counts: group name -> number of pages or states.
        device: device or sharding of the arrays, or the mesh of the devices that divide them (`ArraySpec.split`);
            `None` for JAX's default device.

    Raises:
        ValueError: a group has more slots than int32 can number with padding, `counts` does not fit the layout, or
            a dtype needs JAX's 64-bit mode.
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
                f"{array.name} would be {array.dtype}, which JAX silently narrows without its 64-bit mode; "
                f"choose a narrower dtype"
            )
    places = [_place(array, device) if isinstance(device, Mesh) else device for array in named]
    arrays = tuple(
        jnp.zeros(array.shape, array.dtype, device=place)
        for array, place in zip(named, places, strict=True)
    )
    return Cache(arrays=arrays, keys=tuple((array.layer, array.role) for array in named))


def _place(array: NamedArray, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array over the devices of a mesh of one axis."""
    axes = [mesh.axis_names[0] if axis == array.split else None for axis in range(len(array.shape))]
    return NamedSharding(mesh, PartitionSpec(*axes))


def copy_units(
    cache: Cache,
    layout: CacheLayout,
    group_name: str,
    source_ids: Int[Array, " copies"],
    target_ids: Int[Array, " copies"],
) -> Cache:
    """Copies whole pages or states of one group in all its layers. All sources are read before a target is written.

    The caller donates `cache` when it jits this function. Padding copy r has the target `num_units + r`, which is
    dropped, and any source that is not negative. Copying state 0, the zero state, clears the target.

    Args:
        cache: the cache.
        layout: its layout.
        group_name: the group.
        source_ids: page or state ids to read.
        target_ids: page or state ids to write, all different.
    """
    group = layout.group(group_name)
    keys = {(layer, array.role) for layer in group.layers for array in group.spec.arrays}
    arrays = tuple(
        array.at[target_ids].set(array.at[source_ids].get(mode="clip"), mode="drop")
        if key in keys
        else array
        for key, array in zip(cache.keys, cache.arrays, strict=True)
    )
    return replace(cache, arrays=arrays)

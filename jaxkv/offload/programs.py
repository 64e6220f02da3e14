"""The two programs of swaps: one reads pages or states out of the cache, the other writes them to the cache.

Each handles a bucket of units of one group, in all its layers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int

from jaxkv.cache.spec import ArraySpec, CacheLayout, Group
from jaxkv.cache.state import Cache
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.program_specs import Runner

BUCKETS = (4, 16)
"""Numbers of pages or states per launch; smaller numbers are padded."""

Unit = tuple[Array, ...]
"""A page or state of a group: for each of its `role_stacks` an array `[roles, layers, ...]`."""


def bucket_of(count: int) -> int:
    """Returns the smallest bucket for `count` units, which must fit the largest bucket."""
    return next(size for size in BUCKETS if size >= count)


@dataclass(frozen=True)
class SwapSpec(ProgramSpec[Runner]):
    """The program that reads (swap-out) or writes (swap-in) pages or states of one group in all its layers.

    Attributes:
        out: True for a swap-out, False for a swap-in.
        group: index of the group in the cache's layout.
        units: number of pages or states per launch.
    """

    out: bool
    group: int
    units: int

    @property
    def kind(self) -> str:
        """The kind of program: "swap_out" or "swap_in"."""
        return "swap_out" if self.out else "swap_in"

    @property
    def name(self) -> str:
        """The program's name, with direction, group and units."""
        return f"{self.kind}_{self.group}x{self.units}"

    def lowering(self, runner: Runner) -> Lowering:
        """Returns the function and arguments to lower, see `swap_lowering`."""
        return swap_lowering(runner.layout, runner.counts, self, runner.cache)


def declare_swaps(layout: CacheLayout) -> list[SwapSpec]:
    """Returns the specs of all programs that a host tier needs."""
    return [
        SwapSpec(out, group.index, size)
        for out in (True, False)
        for group in (*layout.paged_groups, *layout.state_groups)
        for size in BUCKETS
    ]


def role_stacks(group: Group) -> tuple[tuple[ArraySpec, ...], ...]:
    """Returns the arrays of a group's spec in role order; neighbours that differ only in their role are together.

    Those of a unit, such as its keys and values, are stacked to one array, because one copy of 8 MiB between device and
    host takes less time than two of 4 MiB.
    """
    found = groupby(group.spec.arrays, lambda one: (one.shape, one.dtype, one.split, one.devices))
    return tuple(tuple(stack) for _, stack in found)


def unit_shapes(group: Group) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns shape and dtype of each array of a unit."""
    layers, leading = len(group.layers), group.spec.leading
    return tuple(
        jax.ShapeDtypeStruct(
            (len(stack), layers, *leading, *stack[0].shape), np.dtype(stack[0].dtype)
        )
        for stack in role_stacks(group)
    )


def unit_bytes(group: Group) -> int:
    """Returns the bytes of a unit over all devices."""
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in unit_shapes(group))


def unit_places(group: Group, cache: Cache) -> tuple[Sharding, ...]:
    """Returns where each array of a unit is on the devices: divided like the cache, see `ArraySpec.split`."""
    place = cache.arrays[0].sharding
    if not isinstance(place, NamedSharding):
        return (place,) * len(role_stacks(group))
    places = []
    for array, *_ in role_stacks(group):
        first = 2 + len(group.spec.leading)
        axes: list[str | None] = [None] * (first + len(array.shape))
        if array.split is not None and array.devices > 1:
            axes[first + array.split] = place.mesh.axis_names[0]
        places.append(NamedSharding(place.mesh, PartitionSpec(*axes)))
    return tuple(places)


def pad_ids(ids: Sequence[int], size: int, count: int) -> Int[np.ndarray, " size"]:
    """Returns ids as int32, padded to `size`.

    Padding ids are out of the pool of `count` units: a read is clipped to the last unit, and a write is dropped.

    Raises:
        ValueError: there is no id, or there are more than `size`.
    """
    if not 0 < len(ids) <= size:
        raise ValueError(f"a program of up to {size} pages or states cannot move {len(ids)}")
    padded = count + np.arange(size, dtype=np.int32)
    padded[: len(ids)] = ids
    return padded


def swap_lowering(
    layout: CacheLayout, counts: Mapping[str, int], spec: SwapSpec, cache: Cache
) -> Lowering:
    """Returns the lowering of `units = read(cache, ids)` or `cache, () = write(cache, ids, units)`, which donates."""
    group, size = layout.groups[spec.group], spec.units
    ids, places = pad_ids([0], size, counts[group.name]), unit_places(group, cache)
    over_mesh = [place for place in places if isinstance(place, NamedSharding)]

    def read(cache: Cache, ids: Int[Array, " size"]) -> tuple[Unit, ...]:
        found = [
            jnp.stack([array.at[ids].get(mode="clip") for array in arrays], axis=1)
            for _, arrays in _by_role(cache, group)
        ]
        # Without the barrier, XLA makes a separate kernel for each unit, and compiles ten times as long.
        found = lax.optimization_barrier(found)
        units = tuple(_stacked(group, [one[at] for one in found]) for at in range(size))
        return lax.with_sharding_constraint(units, (places,) * size) if over_mesh else units

    def write(
        cache: Cache, ids: Int[Array, " size"], units: tuple[Unit, ...]
    ) -> tuple[Cache, tuple[()]]:
        updated = dict(zip(cache.keys, cache.arrays, strict=True))
        by_role = [[part for array in unit for part in jnp.unstack(array)] for unit in units]
        for role, (keys, arrays) in enumerate(_by_role(cache, group)):
            values = jnp.stack([parts[role] for parts in by_role])
            for at, (key, array) in enumerate(zip(keys, arrays, strict=True)):
                updated[key] = array.at[ids].set(values[:, at], mode="drop")
        arrays = tuple(updated[key] for key in cache.keys)
        return replace(cache, arrays=arrays), ()

    if spec.out:
        return Lowering(read, (cache, ids), cache_argument=None)
    types = unit_shapes(group)
    if over_mesh:
        types = tuple(
            one.update(sharding=place) for one, place in zip(types, over_mesh, strict=True)
        )
    return Lowering(write, (cache, ids, (types,) * size), cache_argument=0)


def _stacked(group: Group, parts: Sequence[Array]) -> Unit:
    """Returns the unit whose arrays `[layers, ...]` of each role, in their order, are `parts`."""
    left = iter(parts)
    return tuple(jnp.stack([*islice(left, len(stack))]) for stack in role_stacks(group))


def _by_role(cache: Cache, group: Group) -> Iterator[tuple[list[tuple[int, str]], list[Array]]]:
    """Yields, for each array of a group's spec, its keys and arrays in the cache, layer by layer."""
    found = dict(zip(cache.keys, cache.arrays, strict=True))
    for spec in group.spec.arrays:
        keys = [(layer, spec.role) for layer in group.layers]
        yield keys, [found[key] for key in keys]

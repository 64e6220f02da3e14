"""The two programs between a cache and the host: pages or states read out one by one, and written where they belong.

Each takes a few units of one group in all its layers; how many, is a bucket. Knows nothing of where they go.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxkv.cache.spec import CacheLayout, Group
from jaxkv.cache.state import Cache
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.program_specs import Runner

BUCKETS = (4, 16)
"""Pages or states of one run; fewer are padded."""

Unit = tuple[Array, ...]
"""A page or state of a group: for each array of its spec, in role order, `[layers, ...]` as the cache has it."""


def bucket_of(count: int) -> int:
    """Returns the smallest bucket for so many units, of which there must not be more than the largest holds."""
    return next(size for size in BUCKETS if size >= count)


@dataclass(frozen=True)
class SwapSpec(ProgramSpec[Runner]):
    """A program that reads pages or states of one group, in all its layers, or writes them.

    Attributes:
        out: it reads them, on their way to the host; else it writes them.
        group: index of the group in the cache's layout.
        units: most pages or states.
    """

    out: bool
    group: int
    units: int

    @property
    def kind(self) -> str:
        """The direction."""
        return "swap_out" if self.out else "swap_in"

    @property
    def name(self) -> str:
        """Direction, group and units."""
        return f"{self.kind}_{self.group}x{self.units}"

    def lowering(self, runner: Runner) -> Lowering:
        """Returns what to compile: see `swap_lowering`."""
        return swap_lowering(runner.layout, runner.counts, self, runner.cache)


def declare_swaps(layout: CacheLayout) -> list[SwapSpec]:
    """Lists every program that a tier on the host needs."""
    return [
        SwapSpec(out, group.index, size)
        for out in (True, False)
        for group in (*layout.paged_groups, *layout.state_groups)
        for size in BUCKETS
    ]


def unit_shapes(group: Group) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shape and type of each array of a unit: those of the same spec that the cache is made from."""
    layers, leading = len(group.layers), group.spec.leading
    return tuple(
        jax.ShapeDtypeStruct((layers, *leading, *array.shape), np.dtype(array.dtype))
        for array in group.spec.arrays
    )


def pad_ids(ids: Sequence[int], size: int, count: int) -> Int[np.ndarray, " size"]:
    """Returns ids as int32; padding lies past the `count` units that there are, and is read as the last, not written.

    Raises:
        ValueError: there are none, or more than fit.
    """
    if not 0 < len(ids) <= size:
        raise ValueError(f"a run of up to {size} pages or states cannot move {len(ids)}")
    padded = count + np.arange(size, dtype=np.int32)
    padded[: len(ids)] = ids
    return padded


def swap_lowering(
    layout: CacheLayout, counts: Mapping[str, int], spec: SwapSpec, cache: Cache
) -> Lowering:
    """Returns what to compile: `units = read(cache, ids)`, or `cache, () = write(cache, ids, units)`, which donates."""
    group, size = layout.groups[spec.group], spec.units
    ids = pad_ids([0], size, counts[group.name])

    def read(cache: Cache, ids: Int[Array, " size"]) -> tuple[Unit, ...]:
        found = [
            jnp.stack([array.at[ids].get(mode="clip") for array in arrays], axis=1)
            for _, arrays in _by_role(cache, group)
        ]
        # Else XLA reads each unit by a kernel part of its own, for which it compiles ten times as long.
        found = lax.optimization_barrier(found)
        return tuple(tuple(units[at] for units in found) for at in range(size))

    def write(
        cache: Cache, ids: Int[Array, " size"], units: tuple[Unit, ...]
    ) -> tuple[Cache, tuple[()]]:
        updated = dict(zip(cache.keys, cache.arrays, strict=True))
        for role, (places, arrays) in enumerate(_by_role(cache, group)):
            values = jnp.stack([unit[role] for unit in units])
            for at, (place, array) in enumerate(zip(places, arrays, strict=True)):
                updated[place] = array.at[ids].set(values[:, at], mode="drop")
        arrays = tuple(updated[place] for place in cache.keys)
        return Cache(arrays=arrays, keys=cache.keys), ()

    if spec.out:
        return Lowering(read, (cache, ids), cache_argument=None)
    return Lowering(write, (cache, ids, (unit_shapes(group),) * size), cache_argument=0)


def _by_role(cache: Cache, group: Group) -> Iterator[tuple[list[tuple[int, str]], list[Array]]]:
    """Yields, for each array of a group's spec, its places in the cache and the arrays there, layer by layer."""
    found = dict(zip(cache.keys, cache.arrays, strict=True))
    for spec in group.spec.arrays:
        places = [(layer, spec.role) for layer in group.layers]
        yield places, [found[place] for place in places]

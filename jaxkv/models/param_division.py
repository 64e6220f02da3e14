"""`ParamDivision`: how the devices of a tensor-parallel model divide its parameters, those in 8 and 4 bits too."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Shaped

from jaxkv.models.block import ONCE, Leaf, Split
from jaxkv.models.protocol import Params
from jaxkv.weights.quantised.few_bits_leaf import suits_group
from jaxkv.weights.quantised.weight_forms import is_few_bits

_PER_COLUMNS = ("scales", "zeros")
"""Arrays of a `FewBits` with a column for each group of the weight's."""

_COLUMNS_ALONE = ("order", "inner", "slots")
"""Arrays of a `FewBits` and an `Adapted` without an axis for the weight's rows."""


@dataclass(frozen=True)
class ParamDivision:
    """The parts of a decoder's parameters that each of several devices has.

    A path names a parameter with dots, such as "layers.0.qkv", or an array that belongs to one, such as the codes of a
    `FewBits` in its place, "layers.0.qkv.codes", or a factor of its adapters, "layers.0.qkv.inner" (`LowRank`). A
    global array is the devices' parts one after the other, so the rows of a fused projection are in another order than
    in the whole decoder's.

    Attributes:
        whole: path -> declaration of each parameter of the decoder.
        part: the same of the part of a device.
        mesh: the devices, along one axis; without devices where only types are asked.
    """

    whole: Mapping[str, Leaf]
    part: Mapping[str, Leaf]
    mesh: Mesh | AbstractMesh

    def divide(self, path: str, leaf: Any) -> Any:  # noqa: ANN401 - an array or a `FewBits`
        """Returns a parameter, or an array that belongs to one, divided among the devices.

        Args:
            path: its path.
            leaf: all of it.

        Raises:
            ValueError: it is in 8 or 4 bits, and the devices cannot divide its columns.
        """
        if is_few_bits(leaf):
            return jax.tree_util.tree_map_with_path(
                lambda name, array: self.divide(f"{path}.{dotted(name)}", array), leaf
            )
        split = self._split_of(path, leaf.shape)
        place = NamedSharding(self.mesh, self._spec(split))
        if isinstance(leaf, Tracer):
            if split is None:
                return jax.device_put(leaf, place)
            pieces = [self._piece(path, leaf, split, number) for number in range(self._count)]
            return jax.device_put(jnp.concatenate(pieces, axis=split.axis), place)
        assert isinstance(self.mesh, Mesh), "arrays need devices"
        # Devices of other hosts get their parts from the processes there.
        parts = [
            jax.device_put(
                leaf if split is None else self._piece(path, leaf, split, number), device
            )
            for number, device in enumerate(self.mesh.devices.flat)
            if device.process_index == jax.process_index()
        ]
        shape = list(parts[0].shape)
        if split is not None:
            shape[split.axis] *= self._count
        return jax.make_array_from_single_device_arrays(tuple(shape), place, parts)

    def divided(self, params: Params) -> Params:
        """Returns parameters of the whole decoder, or trees of arrays by path, divided: a copy."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.divide(dotted(path), leaf), params
        )

    def types(self, whole: Params) -> Params:
        """Returns the types of what `divided` returns, with shardings, given those of what it takes.

        Raises:
            ValueError: see `divide`.
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._type(dotted(path), leaf), whole
        )

    def specs(self, params: Params) -> Any:  # noqa: ANN401 - a pytree
        """Returns the partition spec of each array of divided parameters."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self._spec(self._split_of(dotted(path), leaf.shape)), params
        )

    def not_divided(self, params: Params) -> list[str]:
        """Returns the paths of arrays that are not divided among the devices; tracers have no place yet."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(params)
        specs = jax.tree.leaves(self.specs(params), is_leaf=_is_spec)
        return [
            dotted(path)
            for (path, leaf), spec in zip(leaves, specs, strict=True)
            if not (isinstance(leaf, Tracer) or _is_at(leaf, NamedSharding(self.mesh, spec)))
        ]

    @property
    def _count(self) -> int:
        return self.mesh.size

    @cached_property
    def _splits(self) -> Mapping[str, Split | None]:
        """Path of a parameter -> how it is divided; `None` if every device has all of it."""
        return {
            # Token ids that cannot be divided leave the shape of their tables.
            path: leaf.split if leaf.split == ONCE or self.part[path].shape != leaf.shape else None
            for path, leaf in self.whole.items()
        }

    def _split_of(self, path: str, shape: tuple[int, ...]) -> Split | None:
        """Returns how an array is divided; raises `ValueError` if columns in an order of their own would have to be."""
        owner, name = path, ""
        while owner not in self._splits:
            owner, _, last = owner.rpartition(".")
            name = name or last
        split = self._splits[owner]
        if not name or split is None:
            return split
        if split.axis < len(self.whole[owner].shape) - 1:
            return None if name in _COLUMNS_ALONE else split
        if name == "order":
            raise ValueError(
                f"{owner}: its columns are sorted by importance (GPTQ's act-order), so {self._count} devices cannot "
                "divide them; choose tensor_parallel_size=1, or a checkpoint without desc_act"
            )
        if name in ("outer", "slots") or (name in _PER_COLUMNS and shape[-1] == 1):
            return None
        return split._replace(axis=len(shape) - 1)

    def _spec(self, split: Split | None) -> PartitionSpec:
        if split is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * split.axis, self.mesh.axis_names[0])

    def _type(self, path: str, whole: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        split, shape = self._split_of(path, whole.shape), list(whole.shape)
        if split is not None:
            _, widths = self._widths(path, split, shape[split.axis])
            own = sum(width for _, width in widths) if widths else shape[split.axis]
            shape[split.axis] = own * self._count
        place = NamedSharding(self.mesh, self._spec(split))
        return jax.ShapeDtypeStruct(tuple(shape), whole.dtype, sharding=place)

    def _piece(
        self, path: str, leaf: Shaped[Array, "..."], split: Split, number: int
    ) -> Shaped[Array, "..."]:
        """Returns the part of device `number`."""
        if split == ONCE:
            return leaf if number == 0 else jnp.zeros_like(leaf)
        repeats, widths = self._widths(path, split, leaf.shape[split.axis])
        if repeats > 1:
            leaf = jnp.repeat(leaf, repeats, axis=split.axis)
        first, taken = 0, []
        for pieces, width in widths:
            begin = first + number * pieces // self._count * width
            taken.append(jax.lax.slice_in_dim(leaf, begin, begin + width, axis=split.axis))
            first += pieces * width
        return jnp.concatenate(taken, axis=split.axis)

    def _widths(self, path: str, split: Split, size: int) -> tuple[int, list[tuple[int, int]]]:
        """Returns by how much an array's groups of columns are cut, and the number and width of every part's pieces.

        With fewer units than devices, several devices have the same piece. An array of a `FewBits` is as many times
        narrower than the weight as its columns stand for columns of the weight. If a device would have a part of a
        group, groups are cut into smaller ones with the same scale.

        Args:
            path: path of the array.
            split: its division.
            size: its size along the axis.
        """
        whole = sum(columns for columns, _ in split.parts)
        counts = [min(units, self._count) for _, units in split.parts]
        wanted = [
            columns // pieces for (columns, _), pieces in zip(split.parts, counts, strict=True)
        ]
        repeats = 1
        if path.endswith(tuple(f".{name}" for name in _PER_COLUMNS)) and size < whole:
            group = math.gcd(whole // size, *wanted)
            if not suits_group(group, wanted[0]):
                raise ValueError(
                    f"{path}: {self._count} devices would have {wanted[0]} columns each of a weight with a scale for "
                    f"{whole // size}; choose another tensor_parallel_size"
                )
            repeats = whole // size // group
            size *= repeats
        if any(width * size % whole for width in wanted):
            raise ValueError(
                f"{path}: {self._count} devices would have {wanted[0]} columns each, an odd number, of a weight with "
                "two of them in a byte; choose another tensor_parallel_size"
            )
        return repeats, [
            (pieces, width * size // whole) for pieces, width in zip(counts, wanted, strict=True)
        ]


def dotted(path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf of a tree, with dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def _is_at(leaf: object, place: Sharding) -> bool:
    """Whether an array is where a sharding places it."""
    return isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(place, leaf.ndim)

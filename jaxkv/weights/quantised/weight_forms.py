"""The bytes of a model's parameters by dtype, or by code and group."""

import math
from collections import Counter
from typing import Any

import jax

from pallas_kernels.formats.few_bits import FewBits


def is_few_bits(node: object) -> bool:
    """Whether a node of a tree of parameters is a `FewBits`."""
    return isinstance(node, FewBits)


def plain_leaves(params: Any) -> list[Any]:  # noqa: ANN401 - a pytree of arrays, or of their types
    """Returns the arrays of parameters that are no part of a `FewBits`."""
    nodes = jax.tree.leaves(params, is_leaf=is_few_bits)
    return [node for node in nodes if not is_few_bits(node)]


def has_few_bits(params: Any) -> bool:  # noqa: ANN401 - a pytree of arrays, or of their types
    """Whether some parameters are in 8 or 4 bits."""
    return any(map(is_few_bits, jax.tree.leaves(params, is_leaf=is_few_bits)))


def weight_forms(params: Any) -> dict[str, int]:  # noqa: ANN401 - a pytree of arrays, or of their types
    """Returns form -> bytes of the parameters in it, such as "bfloat16" or "int4 in groups of 128"; most first.

    The bytes are those of each device, if several divide the parameters.
    """
    sizes: Counter[str] = Counter()
    for node in jax.tree.leaves(params, is_leaf=is_few_bits):
        name = _form(node) if isinstance(node, FewBits) else str(node.dtype)
        sizes[name] += bytes_of_types(node)
    return dict(sizes.most_common())


def bytes_of_types(params: Any) -> int:  # noqa: ANN401 - a pytree of arrays, or of their types
    """Returns the bytes of parameters on each device."""

    def size(leaf: Any) -> int:  # noqa: ANN401 - an array, or its type
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(params)))


def _form(weight: FewBits) -> str:
    whole = weight.scales.shape[-1] == 1
    zeros = "" if weight.zeros is None else " with zero points"
    rounded = ", activations rounded" if weight.rounds_rows else ""
    return f"{weight.code} {'per row' if whole else f'in groups of {weight.group}'}{zeros}{rounded}"

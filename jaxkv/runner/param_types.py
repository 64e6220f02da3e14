"""`ParamTypes`: the parameters that compiled programs take, and the check of new ones against them."""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format

from jaxkv.models.protocol import Model, Params
from jaxkv.models.tensor_parallel import TensorParallel
from jaxkv.weights.quantised.weight_forms import has_few_bits, is_few_bits, plain_leaves

_MOST_NAMED = 4
"""Parameters that an error message names."""


class ParamTypes:
    """Structure, shape, dtype, layout and sharding of every parameter of a runner.

    Args:
        params: a pytree of arrays on the device.

    Attributes:
        in_few_bits: whether some parameters are in 8 or 4 bits.
    """

    def __init__(self, params: Params) -> None:
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self._names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        self._types = [_type_of(leaf) for _, leaf in leaves]
        self.in_few_bits = has_few_bits(params)

    @property
    def tree(self) -> Params:
        """The parameters' tree with `jax.ShapeDtypeStruct`s as leaves."""
        return jax.tree_util.tree_unflatten(self._structure, self._types)

    @property
    def dtype(self) -> str:
        """Name of the dtype of most numbers, those in 8 or 4 bits and integers not counted."""
        sizes: Counter[str] = Counter()
        for leaf in plain_leaves(self.tree):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                sizes[str(leaf.dtype)] += math.prod(leaf.shape)
        return max(sizes, key=lambda name: sizes[name], default="float32")

    def accept(self, params: Params) -> Params:
        """Returns new parameters as the arrays to run with: JAX arrays as they are, NumPy arrays on the device.

        All are checked before any is copied.

        Raises:
            ValueError: the tree has other names, or an array has another shape, dtype, sharding or memory layout, was
                deleted, or is no array.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        if structure != self._structure:
            given = {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves}
            self._refuse_names(given)
        wrong = [
            f"{name}: {reason}"
            for name, wanted, (_, leaf) in zip(self._names, self._types, leaves, strict=True)
            if (reason := _why_not(leaf, wanted))
        ]
        if wrong:
            raise ValueError(
                f"{len(wrong)} of {len(leaves)} new parameters cannot take the place of the old ones, so nothing was "
                f"changed: {_listed(wrong, '; ')}"
            )
        accepted = [
            # A CPU takes over NumPy's memory, so it must be a copy that nobody else writes.
            leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf.copy(), wanted.sharding)
            for wanted, (_, leaf) in zip(self._types, leaves, strict=True)
        ]
        return jax.tree_util.tree_unflatten(self._structure, accepted)

    def deleted(self, params: Params) -> list[str]:
        """Returns the names of the parameters whose arrays were deleted, as a donation of their owner does."""
        leaves = jax.tree.leaves(params)
        return [
            name
            for name, leaf in zip(self._names, leaves, strict=False)
            if isinstance(leaf, jax.Array) and leaf.is_deleted()
        ]

    def _refuse_names(self, given: set[str]) -> None:
        known = set(self._names)
        missing, unknown = sorted(known - given), sorted(given - known)
        reasons = [f"it lacks {_listed(missing)}"] * bool(missing)
        reasons += [f"it has {_listed(unknown)}, which the model has not"] * bool(unknown)
        reasons = reasons or ["its containers, or its weights in 8 or 4 bits, are of other forms"]
        raise ValueError(
            f"the new parameters differ in structure from those of the model: {'; '.join(reasons)}. Give a tree such "
            "as LLM.params; nothing was changed"
        )


def params_of_model(model: Model, params: Params) -> Params:
    """Returns parameters as the arrays to run a model with, of any dtypes; see `ParamTypes.accept`.

    Raises:
        ValueError: names or shapes are not those of the model, an array was deleted, or a leaf is no array.
    """
    if isinstance(model, TensorParallel):
        model.refuse_undivided(params)
    types = jax.eval_shape(lambda: model.init_params(jax.random.key(0), jnp.float32))
    if jax.tree.structure(params, is_leaf=is_few_bits) == jax.tree.structure(types):
        types = jax.tree.map(_type_like, types, params)
    return ParamTypes(types).accept(params)


def _type_like(wanted: jax.ShapeDtypeStruct, leaf: Any) -> Any:  # noqa: ANN401 - what a user gave
    """Returns the type of a parameter of the shape that the model has, and of the form that it was given in."""
    if is_few_bits(leaf) and leaf.shape == wanted.shape:
        return jax.tree.map(_type_of, leaf)
    return jax.ShapeDtypeStruct(wanted.shape, getattr(leaf, "dtype", wanted.dtype))


def _type_of(leaf: Any) -> jax.ShapeDtypeStruct:  # noqa: ANN401 - an array, or its type
    place = _format(leaf) if isinstance(leaf, jax.Array) else getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _format(array: Any) -> Format:  # noqa: ANN401 - JAX does not declare the attribute
    """Returns sharding and memory layout of a live array."""
    return array.format


def _why_not(leaf: Any, wanted: jax.ShapeDtypeStruct) -> str:  # noqa: ANN401 - what a user gave
    """Returns why an array cannot be used where one of type `wanted` was; empty if it can."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return f"got {type(leaf).__name__}, wanted a JAX or NumPy array"
    if isinstance(leaf, Tracer):
        return "got a tracer; update weights outside of jit"
    if leaf.shape != wanted.shape or leaf.dtype != wanted.dtype:
        return f"got {leaf.dtype}{list(leaf.shape)}, wanted {wanted.dtype}{list(wanted.shape)}"
    if isinstance(leaf, np.ndarray):
        return ""
    if leaf.is_deleted():
        return "the array was deleted, for example because its owner donated it"
    if wanted.sharding is not None and not leaf.sharding.is_equivalent_to(
        wanted.sharding, leaf.ndim
    ):
        return f"got the sharding {leaf.sharding}, wanted {wanted.sharding}"
    layout = wanted.format.layout if isinstance(wanted.format, Format) else None
    if layout is not None and _format(leaf).layout != layout:
        return (
            f"got the memory layout {_format(leaf).layout}, wanted {layout}; copy the array first"
        )
    return ""


def _listed(names: list[str], separator: str = ", ") -> str:
    more = len(names) - _MOST_NAMED
    return separator.join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

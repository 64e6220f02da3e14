"""`NamedWeights`: makes a model's parameters of arrays under their names in a checkpoint, on the device."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree, Shaped

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.load import Loadable, plan_leaves
from jaxkv.weights.rules import RuleSet
from jaxkv.weights.stored_leaf import Arrangement

_WHERE = "the new weights"


@dataclass(frozen=True, eq=False)
class NamedArray:
    """An array in memory, in place of a checkpoint's tensor."""

    name: str
    array: jax.Array
    path: str = _WHERE
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.array.shape

    def equals(self, other: object) -> bool:
        """Whether both hold the same numbers; waits for the device."""
        if not isinstance(other, NamedArray) or self.shape != other.shape:
            return False
        return self.array is other.array or bool(jnp.array_equal(self.array, other.array))


@dataclass(frozen=True)
class _Leaf:
    """The sources of one leaf, and the steps from them to it; hashable, so that it is part of the program's key."""

    target: str
    sources: tuple[str, ...]
    stored_shape: tuple[int, ...]
    dtype: np.dtype
    arrangement: Arrangement
    offset: float


class NamedWeights:
    """A model's parameters, given as arrays under their names in a checkpoint; all of it is checked at once.

    Args:
        arrays: (name, array) of every tensor of the checkpoint: of JAX, of NumPy, or with `__dlpack__` as PyTorch's.
        model: the model.
        rules: which tensors make up which parameter.
        params: types of the parameters; arrays are copied to their device if they are on another one, or divided among
            their devices.
        dtype: dtype name of the parameters.
        divide: returns a parameter divided among several devices, given its dotted path and all of it; `None` for one
            device.

    Attributes:
        signature: names, shapes and dtypes of the arrays, for which `NamedPrograms` are compiled.

    Raises:
        BadCheckpoint: a tensor is missing, has a wrong shape, holds no floating-point numbers, comes twice, or has no
            use.
    """

    def __init__(
        self,
        arrays: Iterable[tuple[str, Any]],
        model: Loadable,
        rules: RuleSet,
        params: PyTree[jax.ShapeDtypeStruct],
        dtype: str,
        divide: Callable[[str, Any], Any] | None = None,
    ) -> None:
        self._types, self._divide = jax.tree.leaves(params), divide
        device = self._types[0].sharding
        named: dict[str, NamedArray] = {}
        for name, array in arrays:
            if name in named:
                raise BadCheckpoint(f"{_WHERE}: {name!r} comes twice")
            named[name] = NamedArray(name, _as_jax(name, array, device))
        plans, self._structure = plan_leaves(named, model, rules, dtype, _WHERE)
        self._leaves = tuple(
            _Leaf(
                plan.target,
                tuple(source.name for source in plan.sources),
                plan.stored_shape,
                plan.dtype,
                plan.arrangement,
                plan.offset,
            )
            for plan in plans
        )
        used = {name for leaf in self._leaves for name in leaf.sources}
        self._sources = {
            name: jax.device_put(one.array, _place(one.array, device))
            for name, one in named.items()
            if name in used
        }
        self.signature = frozenset(
            (name, array.shape, str(array.dtype)) for name, array in self._sources.items()
        )

    def compile(self) -> "NamedPrograms":
        """Compiles the programs for arrays of this signature."""
        sources = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
            self._sources,
        )
        make_all = partial(_make_all, self._leaves, self._divide)
        places = [kind.sharding for kind in self._types] if self._divide is not None else None
        make = jax.jit(partial(_make, make_all), out_shardings=places)
        make_in_place = jax.jit(
            partial(_make_in_place, make_all), donate_argnums=0, out_shardings=places
        )
        return NamedPrograms(
            make.lower(sources).compile(), make_in_place.lower(self._types, sources).compile()
        )

    def params(
        self, programs: "NamedPrograms", donated: PyTree[jax.Array] | None = None
    ) -> PyTree[jax.Array]:
        """Returns the parameters, made by one program as `load_by_rules` makes them: rounded, fused and transposed.

        It waits until the device has read the arrays, which other code may write afterwards.

        Args:
            programs: those of this signature.
            donated: parameters of the model whose memory the new ones take; they are deleted. `None` to allocate.
        """
        if donated is None:
            made = programs.make(self._sources)
        else:
            made = programs.make_in_place(jax.tree.leaves(donated), self._sources)
        return self._structure.unflatten(jax.block_until_ready(made))


class NamedPrograms(NamedTuple):
    """The compiled programs that make a model's parameters of arrays with certain names, shapes and dtypes.

    Attributes:
        make: returns the leaves in new memory, given the arrays by name.
        make_in_place: returns them in the memory of old leaves, its first argument, which are deleted.
    """

    make: Callable[..., Any]
    make_in_place: Callable[..., Any]


def _as_jax(name: str, array: Any, device: Sharding | None) -> jax.Array:  # noqa: ANN401 - of any library
    """Returns an array of floating-point numbers as one of JAX, without a copy if both are on one device.

    One of NumPy goes from the host to each device, since all of them together may not fit into one.
    """
    if not isinstance(array, jax.Array | np.ndarray):
        if not hasattr(array, "__dlpack__"):
            raise BadCheckpoint(
                f"{_WHERE}: {name!r} is of type {type(array).__name__}, wanted an array of JAX, NumPy or PyTorch"
            )
        # A parameter of PyTorch, whose gradient JAX cannot follow.
        array = array.detach() if hasattr(array, "detach") else array
        try:
            array = jax.dlpack.from_dlpack(array)
        except (BufferError, TypeError, RuntimeError) as error:
            raise BadCheckpoint(f"{_WHERE}: {name!r} cannot be shared with JAX: {error}") from error
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise BadCheckpoint(
            f"{_WHERE}: {name!r} has dtype {array.dtype}, wanted floating-point numbers"
        )
    if isinstance(array, np.ndarray):
        return jax.device_put(array, _place(array, device))
    return jnp.asarray(array)


def _place(array: jax.Array | np.ndarray, device: Sharding | None) -> Sharding | None:
    """Returns where an array of a checkpoint is put: of several devices, each has some of its rows."""
    if not isinstance(device, NamedSharding) or device.mesh.size == 1:
        return device
    fits = array.ndim > 0 and array.shape[0] % device.mesh.size == 0
    return NamedSharding(device.mesh, PartitionSpec(*device.mesh.axis_names[: int(fits)]))


def _make_all(
    leaves: tuple[_Leaf, ...],
    divide: Callable[[str, Array], Array] | None,
    sources: Mapping[str, Array],
) -> list[Array]:
    if divide is None:
        return [_assembled(leaf, sources) for leaf in leaves]
    made: list[Array] = []
    for leaf in leaves:
        own = {name: sources[name] for name in leaf.sources}
        if made:
            # One after the other: while a leaf is divided, each device has all of it, and not of others.
            own, made[-1] = lax.optimization_barrier((own, made[-1]))
        made.append(divide(leaf.target, _assembled(leaf, own)))
    return made


def _make(
    make_all: Callable[[Mapping[str, Array]], list[Array]], sources: Mapping[str, Array]
) -> list[Array]:
    # Copies, since an array that is returned as it came would be shared with its owner.
    return [jnp.array(made, copy=True) for made in make_all(sources)]


def _make_in_place(
    make_all: Callable[[Mapping[str, Array]], list[Array]],
    old: list[Array],
    sources: Mapping[str, Array],
) -> list[Array]:
    # An old leaf that the program did not read would not be donated.
    return [
        lax.dynamic_update_slice(one, made, (0,) * one.ndim)
        for one, made in zip(old, make_all(sources), strict=True)
    ]


def _assembled(leaf: _Leaf, sources: Mapping[str, Array]) -> Shaped[Array, "..."]:
    flat = [sources[name].astype(leaf.dtype).reshape(-1) for name in leaf.sources]
    stored = jnp.concatenate(flat).reshape(leaf.stored_shape)
    if leaf.offset:
        stored += jnp.asarray(leaf.offset, leaf.dtype)
    return leaf.arrangement.apply(stored, jnp)

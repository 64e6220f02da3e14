"""Traces and lowers a pure function from the types of its arguments, with its cache donated.

It refuses what JAX would do silently: narrow or guess a dtype, embed arrays in the code, or drop a donation because an
array of the cache changes its type.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxkv.errors import ProgramRefused
from pallas_kernels.argument_weights import argument_weights, computed_weights

_LOG = logging.getLogger(__name__)

CONSTANT_BYTES = 2**20
"""Most bytes of arrays in a program's code; more means that the function closes over weights or a cache."""


@dataclass(frozen=True)
class Lowering:
    """What to compile.

    Attributes:
        function: a pure function of positional arguments that returns the cache, or a tuple that starts with it.
        arguments: pytrees of arrays or `jax.ShapeDtypeStruct`; only their shapes, dtypes and shardings are read.
        cache_argument: position of the cache, which calls donate; `None` if there is none.
        compiler_options: XLA options for this program alone.
        has_equal_rows: the bits of a row must not depend on its place among the rows.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    cache_argument: int | None = 1
    compiler_options: Mapping[str, bool | int | str] | None = None
    has_equal_rows: bool = False

    def without_arrays(self) -> "Lowering":
        """Returns it with the types of its arguments in their place, so that it keeps no memory.

        Raises:
            ValueError: the arguments are no arrays with a dtype.
        """
        return replace(self, arguments=argument_types(self))


def argument_types(lowering: Lowering) -> tuple[Any, ...]:
    """Returns the arguments as `jax.ShapeDtypeStruct`, with their shardings.

    If some are arrays over a mesh, all of its devices get a copy of those without a place, such as the host's.

    Raises:
        ValueError: they are no arrays with a dtype.
    """
    specs = jax.tree_util.tree_map_with_path(_spec, lowering.arguments)
    everywhere = _everywhere(specs)
    if everywhere is None:
        return specs
    return jax.tree.map(
        lambda spec: spec.update(sharding=everywhere) if spec.sharding is None else spec, specs
    )


def trace(name: str, lowering: Lowering) -> jax.stages.Traced:
    """Traces one program from the types of its arguments; the trace is the same in every process.

    Raises:
        ProgramRefused: the function does not return its cache with the same shapes and dtypes, or closes over weights.
        ValueError: the arguments are no arrays with a dtype.
    """
    specs = argument_types(lowering)
    donated = () if lowering.cache_argument is None else (lowering.cache_argument,)

    def named(*arguments: Any) -> Any:  # noqa: ANN401 - a function of any pytrees
        return _placed_like(lowering.function(*arguments), [specs[at] for at in donated])

    named.__name__ = name
    traced = _traced(named, specs, donated)
    if lowering.cache_argument is not None:
        _check_cache_returns(name, specs[lowering.cache_argument], traced.out_info)
    constants = sum(getattr(constant, "nbytes", 0) for constant in traced.jaxpr.consts)
    if constants > CONSTANT_BYTES:
        raise ProgramRefused(
            f"{name} has {constants:,} bytes of arrays in its code, at most {CONSTANT_BYTES:,} are allowed; "
            "pass weights and tables as arguments"
        )
    return traced


def _traced(
    function: Callable[..., Any], specs: tuple[Any, ...], donated: tuple[int, ...]
) -> jax.stages.Traced:
    """Traces with weights as arguments (`argument_weights`), or without that promise if it turns out to be wrong.

    Only the parameters, the first argument, are complete before every launch.
    """
    counts = [len(jax.tree.leaves(one)) for one in specs]
    are_given = [
        at == 0 and at not in donated for at, count in enumerate(counts) for _ in range(count)
    ]
    # Not `keep_unused=True`: JAX 0.11's cache of pruned traces then holds each trace for the life of the process.
    with argument_weights():
        traced = jax.jit(function, donate_argnums=donated).trace(*specs)
    if computed := computed_weights(traced.jaxpr.jaxpr, are_given):
        _LOG.debug("%s computes weights of %s", function.__name__, ", ".join(sorted(computed)))
        return jax.jit(function, donate_argnums=donated).trace(*specs)
    return traced


def _spec(path: tuple, leaf: object) -> jax.ShapeDtypeStruct:
    """Returns the type of one argument, with its sharding if it is committed to a device."""
    where = f"argument{jax.tree_util.keystr(path)}"
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise ValueError(f"{where} must be an array, got {type(leaf).__name__}")
    if leaf.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype):
        raise ValueError(f"{where} is {leaf.dtype}, which JAX would narrow; convert it")
    if getattr(leaf, "weak_type", False):
        raise ValueError(
            f"{where} is weakly typed; give it a dtype, as in jnp.asarray(x, jnp.float32)"
        )
    # JAX moves an uncommitted array to the device of the others.
    place = None
    if not isinstance(leaf, np.ndarray) and getattr(leaf, "committed", True):
        place = _without_last_nones(leaf.sharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _without_last_nones(place: Sharding | None) -> Sharding | None:
    """Returns a sharding as JAX writes a result's, so that a cache's first arrays and later ones have one type."""
    if not isinstance(place, NamedSharding) or place.spec.unreduced or place.spec.reduced:
        return place
    axes = list(place.spec)
    while axes and axes[-1] is None:
        axes.pop()
    return place.update(spec=PartitionSpec(*axes))


def _everywhere(specs: Any) -> NamedSharding | None:  # noqa: ANN401 - a pytree
    """Returns the sharding that gives each device of the arguments' mesh a copy; `None` without a mesh of several."""
    for spec in jax.tree.leaves(specs):
        if isinstance(spec.sharding, NamedSharding) and spec.sharding.mesh.size > 1:
            return NamedSharding(spec.sharding.mesh, PartitionSpec())
    return None


def _placed_like(out: Any, caches: Sequence[Any]) -> Any:  # noqa: ANN401 - pytrees
    """Returns a program's output with the cache, its first part, placed as it was, and copies of the rest everywhere.

    Otherwise XLA may choose other places, and then the cache's memory could not be used again.
    """
    everywhere = _everywhere(caches)
    if everywhere is None:
        return out
    places = [spec.sharding for spec in jax.tree.leaves(caches)]
    leaves, structure = jax.tree.flatten(out)
    places += [everywhere] * (len(leaves) - len(places))
    placed = map(jax.lax.with_sharding_constraint, leaves, places)
    return structure.unflatten(placed)


def _check_cache_returns(name: str, cache: object, out: object) -> None:
    """Raises `ProgramRefused` if an array of the cache changes shape or dtype, which would prevent its donation."""
    alone = jax.tree.structure(cache) == jax.tree.structure(out)
    returned = out[0] if isinstance(out, tuple) and out and not alone else out
    if jax.tree.structure(cache) != jax.tree.structure(returned):
        raise ProgramRefused(
            f"{name} must return its cache, or a tuple that starts with it; it returns "
            f"{jax.tree.structure(returned)}"
        )
    leaves, _ = jax.tree_util.tree_flatten_with_path(cache)
    for (path, given), back in zip(leaves, jax.tree.leaves(returned), strict=True):
        if (given.shape, given.dtype) != (back.shape, back.dtype):
            raise ProgramRefused(
                f"{name} takes cache{jax.tree_util.keystr(path)} as {given.dtype}{list(given.shape)} and returns it as "
                f"{back.dtype}{list(back.shape)}; return it unchanged in shape and dtype"
            )

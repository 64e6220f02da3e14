"""`pytree` and `static_field`, with which all device state is declared: frozen, keyword-only flax dataclasses."""

from typing import Any, dataclass_transform, no_type_check

import flax.struct


def static_field(**options: Any) -> Any:  # noqa: ANN401 - mirrors dataclasses.field, whose result fits any annotation
    """Declares a field that is part of the tree's structure (hashed, compared), not of its data."""
    return flax.struct.field(pytree_node=False, **options)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(static_field,))
def pytree[T](cls: type[T]) -> type[T]:
    """Makes a class a frozen, keyword-only pytree dataclass with `.replace`.

    JAX rebuilds pytrees from shapes, sentinels and tracers (`eval_shape`, `tree.map`, `vmap`, `lower`), so
    the constructor must not check anything: `no_type_check` keeps the tests' shape checker away from it.
    """
    return no_type_check(flax.struct.dataclass(cls, kw_only=True))

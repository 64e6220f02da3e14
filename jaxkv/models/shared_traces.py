"""`SharedTraces`: layers that give a function equal shapes and settings share its trace, and what is lowered from it.

XLA inlines the calls before anything else, so a program is the same as with a trace of each layer. But Python, which
takes most of the time until a program is compiled, works through each kind of layer once.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np


class SharedTraces:
    """Calls the functions of which one trace of a model consists. It must not outlive that trace.

    Args:
        shares: whether calls share traces; otherwise each is traced in its place.
    """

    def __init__(self, *, shares: bool) -> None:
        self._shares = shares
        self._traced: dict[Hashable, Callable[[list[Any]], Any]] = {}

    def call[T](
        self,
        name: str,
        function: Callable[..., T],
        *arguments: Any,  # noqa: ANN401 - any pytrees
        settings: Hashable = None,
    ) -> T:
        """Returns `function(*arguments)`, by an earlier trace if there is one of equal types.

        Args:
            name: name of the function in profiles; functions of equal names and settings must do the same.
            function: a function of pytrees, of which it also returns one.
            arguments: its arguments; leaves that are no arrays are constants of the trace.
            settings: what else its trace depends on.
        """
        if not self._shares:
            return function(*arguments)
        leaves, structure = jax.tree.flatten(arguments)
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        constants = tuple(
            None if array else leaf for leaf, array in zip(leaves, is_array, strict=True)
        )
        # 1 and 1.0 and True are equal, and make different traces.
        kinds = tuple(map(type, constants))
        key = (name, settings, structure, tuple(is_array), constants, kinds)
        if key not in self._traced:

            def traced(arrays: list[Any]) -> T:
                given = iter(arrays)
                pairs = zip(constants, is_array, strict=True)
                return function(
                    *structure.unflatten([next(given) if array else leaf for leaf, array in pairs])
                )

            traced.__name__ = name
            self._traced[key] = jax.jit(traced)
        return self._traced[key](
            [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
        )

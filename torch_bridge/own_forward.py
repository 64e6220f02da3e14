"""`OwnForward`: a callable in the place of `forward` on an instance of a module, since a hook cannot skip a forward."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch


class OwnForward:
    """Callable in the place of a module's `forward`. Copied or pickled with its module, it serves the copy.

    Args:
        module: the module; only a weak reference is kept.
        inner: the `forward` that was an attribute of the instance before; `None` for that of the class.
    """

    def __init__(self, module: torch.nn.Module, inner: Callable[..., Any] | None = None) -> None:
        self.inner = inner
        self._module = weakref.ref(module)

    def original(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the module's own
        """Calls the module's own forward."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        module = self.module()
        return type(module).forward(module, *args, **kwargs)

    def module(self) -> torch.nn.Module:
        """Returns the module."""
        module = self._module()
        if module is None:
            raise RuntimeError(
                "the model of this forward no longer exists; call the forward of the copy's own class"
            )
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnForward":
        # While a module is copied, its copy is in `memo` before the attributes are copied.
        module = self.module()
        return type(self)(memo.get(id(module), module), copy.deepcopy(self.inner, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module(), self.inner)

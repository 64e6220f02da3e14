"""`OwnForward`: a callable in the place of `forward` on an instance of a module, since a hook cannot skip a forward.

`ReplayedForward` is that of a model whose caches replay its decode steps. All caches share one; the last removes it.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_bridge.transformers_cache.forward_call import CACHE_NAMES
from torch_bridge.transformers_cache.uncompiled import uncompiled

_NAME = "forward"


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


class ReplayedForward(OwnForward):
    """`OwnForward` of a model.

    Attributes:
        users: number of caches that have installed it.
    """

    def __init__(self, model: torch.nn.Module, inner: Callable[..., Any] | None = None) -> None:
        super().__init__(model, inner)
        self.users = 0
        self.__signature__ = inspect.signature(inner or getattr(type(model), _NAME).__get__(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's own
        """Replays the forward, or calls the model's own."""
        replayed = _replay(kwargs, self.original)
        return self.original(*args, **kwargs) if replayed is None else replayed


@uncompiled
def _replay(arguments: Mapping[str, Any], original: Callable[..., Any]) -> Any:  # noqa: ANN401
    """Returns the replayed output of a forward, or `None` if no cache among the arguments replays it."""
    for name in CACHE_NAMES:
        replay = getattr(arguments.get(name), "replay", None)
        if replay is not None:
            return replay(arguments, original)
    return None


def install(model: torch.nn.Module) -> Callable[[], None]:
    """Puts a `ReplayedForward` on the model, unless it has one, and returns a function that takes it back."""
    found = vars(model).get(_NAME)
    if not isinstance(found, ReplayedForward):
        found = ReplayedForward(model, found)
        vars(model)[_NAME] = found
    found.users += 1
    kept, where = found, weakref.ref(model)
    return lambda: _remove(kept, where())


def _remove(forward: ReplayedForward, model: torch.nn.Module | None) -> None:
    forward.users -= 1
    # Whoever has wrapped it since keeps it; without users it only calls the model's own forward.
    if forward.users or model is None or vars(model).get(_NAME) is not forward:
        return
    if forward.inner is None:
        del vars(model)[_NAME]
    else:
        vars(model)[_NAME] = forward.inner

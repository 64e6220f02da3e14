"""`ReplayedForward`: a model's own `forward`, except that a forward with a cache that can replay it is replayed.

It is an attribute of the model instance, since a hook cannot skip a forward. All caches of a model share one; the last
cache removes it.
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


class ReplayedForward:
    """Callable in the place of `model.forward`. Copied or pickled with its model, it serves the copy.

    Args:
        model: the model; only a weak reference is kept.
        inner: the `forward` that was an attribute of the instance before; `None` for that of the class.
    """

    def __init__(self, model: torch.nn.Module, inner: Callable[..., Any] | None = None) -> None:
        self.inner = inner
        self.users = 0
        self._model = weakref.ref(model)
        self.__signature__ = inspect.signature(inner or getattr(type(model), _NAME).__get__(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's own
        """Replays the forward, or calls the model's own."""
        replayed = _replay(kwargs, self.original)
        return self.original(*args, **kwargs) if replayed is None else replayed

    def original(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Calls the model's own forward."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        model = self._model()
        if model is None:
            raise RuntimeError(
                "the model of this forward no longer exists; call the forward of the copy's own class"
            )
        return type(model).forward(model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReplayedForward":
        # While a model is copied, its copy is in `memo` before the attributes are copied.
        model = self._model()
        return type(self)(memo.get(id(model), model), copy.deepcopy(self.inner, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._model(), self.inner)


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

"""`ReplayedForward`: a model's forward that its caches may replay; all caches share one, and the last removes it."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_bridge.on_model import OnModel
from torch_bridge.own_forward import OwnForward
from torch_bridge.transformers_cache.forward_call import CACHE_NAMES, by_name
from torch_bridge.transformers_cache.uncompiled import uncompiled

_NAME = "forward"


class ReplayedForward(OwnForward):
    """`OwnForward` of a model, which asks the cache that it is given for a replay first."""

    def __init__(self, model: torch.nn.Module, inner: Callable[..., Any] | None = None) -> None:
        super().__init__(model, inner)
        self.__signature__ = inspect.signature(inner or getattr(type(model), _NAME).__get__(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's own
        """Replays the forward, or calls the model's own."""
        replayed = _replay(self, args, kwargs)
        return self.original(*args, **kwargs) if replayed is None else replayed


@uncompiled
def _replay(forward: OwnForward, args: tuple, kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Returns the replayed output of a forward, or `None` if no cache among the arguments replays it."""
    arguments = by_name(forward.module(), args, kwargs) if args else kwargs
    for name in CACHE_NAMES:
        replay = getattr(arguments.get(name), "replay", None)
        if replay is not None:
            return replay(arguments, forward.original)
    return None


def _put(model: torch.nn.Module) -> None:
    found = vars(model).get(_NAME)
    # A copy of a model comes with its own.
    if not isinstance(found, ReplayedForward):
        vars(model)[_NAME] = ReplayedForward(model, found)


def _take(model: torch.nn.Module, _: None) -> None:
    found = vars(model).get(_NAME)
    # Whoever has wrapped it since keeps it; without caches it only calls the model's own forward.
    if not isinstance(found, ReplayedForward):
        return
    if found.inner is None:
        del vars(model)[_NAME]
    else:
        vars(model)[_NAME] = found.inner


_REPLAYED = OnModel(_put, _take)


def is_replayed(model: torch.nn.Module) -> bool:
    """Whether a call of the model reaches a `ReplayedForward` before anything that has wrapped its forward."""
    return isinstance(vars(model).get(_NAME), ReplayedForward)


def install(model: torch.nn.Module) -> Callable[[], None]:
    """Puts a `ReplayedForward` on the model, unless it has one; returns a function that ends one call of this."""
    return _REPLAYED.use(model)

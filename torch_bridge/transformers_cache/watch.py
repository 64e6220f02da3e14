"""Two hooks on a model, which call the cache that a forward is given, before and after the forward.

All caches of a model share them: torch calls a hook without the keyword arguments if it is registered or removed while
a forward begins in another thread, so hooks must not come and go with single caches.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import torch
from torch.utils.hooks import RemovableHandle

from torch_bridge.on_model import OnModel
from torch_bridge.transformers_cache.forward_call import CACHE_NAMES, ForwardCall, by_name
from torch_bridge.transformers_cache.uncompiled import uncompiled


class Watching(Protocol):
    """Interface of an object that the hooks call, such as a cache."""

    def watches(self, model: torch.nn.Module) -> bool:
        """Whether the object is to be called for forwards of a model."""
        ...

    def begin(self, call: ForwardCall) -> dict[str, Any]:
        """Prepares a forward and returns its arguments by name."""
        ...

    def end(self, *, failed: bool) -> None:
        """Ends this thread's forward; does nothing if this thread has begun none."""
        ...


class Hook:
    """A hook that calls caches among the arguments. Copied or pickled with its model, it does nothing in the copy."""

    def __init__(self, *, calls: bool = False) -> None:
        self._calls = calls

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def _given_in(self, module: torch.nn.Module, arguments: Mapping[str, Any]) -> Watching | None:
        """Returns the forward's cache if it watches the module, else `None`."""
        if not self._calls:
            return None
        for name in CACHE_NAMES:
            cache: Any = arguments.get(name)
            watches = getattr(cache, "watches", None)
            if watches is not None and watches(module):
                return cache
        return None


class _Before(Hook):
    @uncompiled
    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple,
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        # Without keyword arguments, the forward began while no cache of this model existed, so it has none.
        if kwargs is None:
            return None
        arguments = by_name(module, args, kwargs)
        cache = self._given_in(module, arguments)
        return None if cache is None else ((), cache.begin(ForwardCall.of(arguments)))


class _After(Hook):
    @uncompiled
    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple,
        *more: Any,  # noqa: ANN401 - the keyword arguments and the result, or the result alone
    ) -> None:
        if len(more) < 2:
            return
        kwargs, out = more
        # Hooks run for every forward of the model: with other caches, in other threads, nested in this one.
        cache = self._given_in(module, by_name(module, args, kwargs))
        if cache is not None:
            cache.end(failed=out is None)


def _put(model: torch.nn.Module) -> tuple[RemovableHandle, ...]:
    return (
        model.register_forward_pre_hook(_Before(calls=True), with_kwargs=True),
        model.register_forward_hook(_After(calls=True), with_kwargs=True, always_call=True),
    )


def _take(model: torch.nn.Module, handles: tuple[RemovableHandle, ...]) -> None:
    for handle in handles:
        handle.remove()


_HOOKS = OnModel(_put, _take)


def watch(model: torch.nn.Module) -> Callable[[], None]:
    """Has a model's forwards call the caches that they are given; returns a function that ends one call of this."""
    return _HOOKS.use(model)

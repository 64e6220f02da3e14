"""Hooks that call a cache before and after each forward of its model that is given the cache."""

import weakref
from collections.abc import Mapping
from typing import Any, Protocol, Self

import torch
from torch.utils.hooks import RemovableHandle

from torch_bridge.transformers_cache.forward_call import CACHE_NAMES, ForwardCall, by_name
from torch_bridge.transformers_cache.uncompiled import uncompiled


class Watching(Protocol):
    """Interface of an object that the hooks call, such as a cache."""

    def begin(self, call: ForwardCall) -> dict[str, Any]:
        """Prepares a forward and returns its arguments by name."""
        ...

    def end(self, *, failed: bool) -> None:
        """Ends this thread's forward; does nothing if this thread has begun none."""
        ...


class Hook:
    """Holds a weak reference to its cache. Copied or pickled with its model, it becomes a hook that does nothing."""

    def __init__(self, cache: Watching | None = None) -> None:
        self._cache = None if cache is None else weakref.ref(cache)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def _given_in(self, arguments: Mapping[str, Any]) -> Watching | None:
        """Returns the cache if it is among the forward's arguments, else `None`."""
        cache = None if self._cache is None else self._cache()
        if cache is None or all(arguments.get(name) is not cache for name in CACHE_NAMES):
            return None
        return cache


class _Before(Hook):
    @uncompiled
    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        arguments = by_name(module, args, kwargs)
        cache = self._given_in(arguments)
        return None if cache is None else ((), cache.begin(ForwardCall.of(arguments)))


class _After(Hook):
    @uncompiled
    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        out: Any,  # noqa: ANN401
    ) -> None:
        # Hooks run for every forward of the model: with other caches, in other threads, nested in this one.
        cache = self._given_in(by_name(module, args, kwargs))
        if cache is not None:
            cache.end(failed=out is None)


def watch(model: torch.nn.Module, cache: Watching) -> tuple[RemovableHandle, ...]:
    """Registers hooks that call the cache at each forward of the model that is given it; returns their handles."""
    return (
        model.register_forward_pre_hook(_Before(cache), with_kwargs=True),
        model.register_forward_hook(_After(cache), with_kwargs=True, always_call=True),
    )

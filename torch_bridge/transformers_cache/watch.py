"""The hooks by which a cache learns of its model's forwards: before each that is given it, and after it."""

import weakref
from collections.abc import Mapping
from typing import Any, Protocol, Self

import torch
from torch.utils.hooks import RemovableHandle

from torch_bridge.transformers_cache.forward_call import CACHE_NAMES, ForwardCall, by_name
from torch_bridge.transformers_cache.uncompiled import uncompiled


class Watching(Protocol):
    """What is told of forwards."""

    def begin(self, call: ForwardCall) -> dict[str, Any]:
        """Makes ready for a forward and returns its arguments by name."""
        ...

    def end(self, *, failed: bool) -> None:
        """Ends the forward that this thread has begun; does nothing if it has begun none."""
        ...


class Hook:
    """Knows its cache weakly. In a copy of the model, or when it is pickled, it is a hook that does nothing."""

    def __init__(self, cache: Watching | None = None) -> None:
        self._cache = None if cache is None else weakref.ref(cache)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def _given_in(self, arguments: Mapping[str, Any]) -> Watching | None:
        """Returns the cache if a forward was given it."""
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
        # Hooks run for every forward of the model: of other caches, in other threads, inside of this one.
        cache = self._given_in(by_name(module, args, kwargs))
        if cache is not None:
            cache.end(failed=out is None)


def watch(model: torch.nn.Module, cache: Watching) -> tuple[RemovableHandle, ...]:
    """Tells a cache of all forwards of a model that are given it, until the handles are removed."""
    return (
        model.register_forward_pre_hook(_Before(cache), with_kwargs=True),
        model.register_forward_hook(_After(cache), with_kwargs=True, always_call=True),
    )

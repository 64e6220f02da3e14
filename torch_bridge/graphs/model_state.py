"""`ModelState`: what a recording of a model's forward assumes of the model, and whether it still holds.

A graph reads weights by address, so new values in the same memory are no change.
"""

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from torch_bridge.transformers_cache.fingerprint import KnownModel

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_TRANSFORMERS = "transformers.utils.output_capturing"
"""Module of hooks that do nothing unless a forward asks for hidden states or the like."""
MOVED = "parameters or buffers of the model were replaced or moved"
CHANGED = "modules, hooks, attributes or the config of the model have changed"
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PLAIN_VALUES = (bool, int, float, str)


def why_unrecordable(model: PreTrainedModel) -> str | None:
    """Returns why a graph cannot stand for forwards of this model, or `None`."""
    for name, module in model.named_modules():
        if module is model:
            continue
        hooks = [hook for kind in _HOOKS for hook in getattr(module, kind).values()]
        if any(getattr(hook, "__module__", "") != _OF_TRANSFORMERS for hook in hooks):
            return f"{name} has hooks, which a graph would not call"
    for name, tensor in _named_tensors(model):
        if type(tensor) not in _PLAIN:
            return f"{name} is a {type(tensor).__name__}, whose memory is not known"
    return None


class ModelState:
    """The state of a model at the time of a recording.

    It keeps what it compares by identity, so that nothing new takes an old one's `id`, and a graph never reads freed
    memory where a tensor was replaced, until `why_changed` finds it.

    Args:
        model: the model.
        known: the same model, for its structure.
    """

    def __init__(self, model: PreTrainedModel, known: KnownModel) -> None:
        modules = list(model.modules())
        self._model, self._known = model, known
        self._inner = [vars(module) for module in modules if module is not model]
        self._children = [module._modules for module in modules]
        self._hooks = [held[kind] for held in self._inner for kind in _HOOKS]
        self._owners = [held for one in modules for held in (one._parameters, one._buffers)]
        self._entries = _values(self._owners)
        self._parts = _values(self._children), _values(self._hooks)
        self._attributes = self._read_attributes()
        self._tensors = [tensor for tensor in self._entries if tensor is not None]
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))
        self._forms = self._read_forms()
        self._structure = known.structure()

    def has_same_memory(self) -> bool:
        """Whether the parameters and buffers of the recording are at the same addresses."""
        return list(map(torch.Tensor.data_ptr, self._tensors)) == self._pointers

    def why_changed(self) -> str | None:
        """Returns what has changed among tensors, submodules, hooks and the modules' attributes, or `None`.

        Attributes are compared by value if they are plain, and else by identity.
        """
        if not _are_same(_values(self._owners), self._entries) or self._read_forms() != self._forms:
            return MOVED
        now = _values(self._children), _values(self._hooks)
        if not all(map(_are_same, now, self._parts)):
            return CHANGED
        return None if _are_equal(self._read_attributes(), self._attributes) else CHANGED

    def has_same_structure(self) -> bool:
        """Whether all attributes and configs are the same (`KnownModel.structure`)."""
        return self._known.structure() == self._structure

    def _read_forms(self) -> tuple[list[Any], list[Any]]:
        return list(map(torch.Tensor.size, self._tensors)), list(
            map(torch.Tensor.stride, self._tensors)
        )

    def _read_attributes(self) -> list[Any]:
        # The model's own forward is the caller's.
        outer = [value for name, value in list(vars(self._model).items()) if name != "forward"]
        return outer + _values(self._inner)


def _values(held: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, held)))


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _are_equal(now: list[Any], before: list[Any]) -> bool:
    """Whether values are the same objects, or equal plain ones; the objects are nearly always the same."""
    if len(now) != len(before):
        return False
    return _are_same(now, before) or all(
        one is other
        or (type(one) is type(other) and isinstance(one, _PLAIN_VALUES) and one == other)
        for one, other in zip(now, before, strict=True)
    )


def why_not_now(model: PreTrainedModel, device: torch.device) -> str | None:
    """Returns why torch's settings of this moment forbid a replay, or `None`."""
    if model.training:
        return "the model is in training mode"
    if torch.is_grad_enabled() and any(one.requires_grad for one in model.parameters()):
        return "gradients are enabled; run the forward under torch.no_grad()"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "a torch mode, such as a torch.device context, sees each operation"
    if torch_module._has_any_global_hook():
        return "global module hooks are registered, which a graph would not call"
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return f"torch's current device is cuda:{torch.cuda.current_device()}, the model is on {device}"
    return None


def _named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()

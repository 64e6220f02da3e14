"""`ModelState`: what a recording of a model's forward assumes of the model, and whether it still holds.

A graph reads weights by address, so new values in the same memory are no change.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from torch_bridge.transformers_cache.fingerprint import structure

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_TRANSFORMERS = "transformers.utils.output_capturing"
"""Module of hooks that do nothing unless a forward asks for hidden states or the like."""
MOVED = "parameters or buffers of the model were replaced or moved"
CHANGED = "modules, hooks, attributes or the config of the model have changed"
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


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
    """The state of a model at the time of a recording."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        modules = [module for module in model.modules() if module is not model]
        self._modules = modules
        entries = [
            (held, name)
            for module in model.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        self._owners = [held for held, _ in entries]
        self._names = [name for _, name in entries]
        # Kept, so that a graph never reads freed memory where a tensor was replaced, until `why_changed` finds it.
        self._tensors = self._current_tensors()
        self._ids = list(map(id, self._tensors))
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))
        self._strides = list(map(torch.Tensor.stride, self._tensors))
        children = [
            (module._modules, name) for module in model.modules() for name in module._modules
        ]
        self._parents = [held for held, _ in children]
        self._child_names = [name for _, name in children]
        self._hooks = [getattr(module, kind) for module in modules for kind in _HOOKS]
        self._shape = self._read_shape()
        self._structure = structure(model)

    def has_same_memory(self) -> bool:
        """Whether the parameters and buffers of the recording are at the same addresses."""
        return list(map(torch.Tensor.data_ptr, self._tensors)) == self._pointers

    def why_changed(self) -> str | None:
        """Returns what has changed among tensors, submodules, hooks, attributes' names and training mode, or `None`."""
        if list(map(id, self._current_tensors())) != self._ids:
            return MOVED
        if list(map(torch.Tensor.stride, self._tensors)) != self._strides:
            return MOVED
        return CHANGED if self._read_shape() != self._shape else None

    def has_same_structure(self) -> bool:
        """Whether all attributes and configs are the same (`fingerprint.structure`); costs some milliseconds."""
        return structure(self._model) == self._structure

    def _current_tensors(self) -> list[Any]:
        return list(map(dict.get, self._owners, self._names))

    def _read_shape(self) -> tuple[list[int], ...]:
        return (
            list(map(id, map(dict.get, self._parents, self._child_names))),
            list(map(len, self._hooks)),
            list(map(len, map(vars, self._modules))),
            list(map(attrgetter("training"), self._modules)),
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

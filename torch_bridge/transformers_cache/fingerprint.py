"""What a model computes with, as far as kept prefixes depend on it. Reads the model and changes nothing."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel

from torch_bridge.transformers_cache.checksum import checksums
from torch_bridge.transformers_cache.watch import Hook

_TURNS_WITH_LENGTH = ("dynamic", "longrope")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_COMPUTED_WITH = {
    "training",
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
}
_MACHINERY = set(vars(torch.nn.Module())) - _COMPUTED_WITH
"""Attributes of every module that do not change what its forward returns."""


@dataclass(frozen=True)
class Fingerprint:
    """What a model computed with at one moment. Two are equal if the same tokens give the same keys.

    Attributes:
        values: structure and plain attributes, and the `id` of each object that is compared by identity.
        sums: of the bits of all tensors.
        objects: those compared by identity, held so that no other object gets their `id`.
    """

    values: tuple[Any, ...]
    sums: tuple[int, ...]
    objects: tuple[object, ...] = field(compare=False)


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """Returns something that differs when the same tokens may give other keys than before.

    It compares every element of all parameters, buffers, other tensors and NumPy arrays of the modules; their plain
    attributes, and containers, dataclasses and namespaces of such; their configs, training mode, structure and
    autocast; and the `forward` of their classes. Hooks, replaced functions and all other objects are compared by
    identity, so it does not see a change inside such an object, such as in a closure, nor of global state. It reads all
    weights once; the host waits for that.
    """
    reading = _Reading()
    reading.visit(model)
    for kind in ("cpu", "cuda"):
        reading.values.append(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
    return Fingerprint(tuple(reading.values), checksums(reading.tensors), tuple(reading.objects))


class _Reading:
    """What was found so far, in the order of attributes."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.objects: list[object] = []
        self._visited: dict[int, tuple[int, object]] = {}

    def visit(self, found: Any) -> None:  # noqa: ANN401 - an attribute may be anything
        if isinstance(found, _PLAIN):
            self.values.append(found)
            return
        known = id(found) in self._visited
        place, _ = self._visited.setdefault(id(found), (len(self._visited), found))
        self.values.append((type(found), place))
        if known:
            return
        if isinstance(found, torch.Tensor):
            self._visit_tensor(found)
        elif isinstance(found, torch.nn.Module | PreTrainedConfig):
            # A list, since another thread may hook the model meanwhile.
            items = list(vars(found).items())
            self._visit_items(item for item in items if item[0] not in _MACHINERY)
            if isinstance(found, torch.nn.Module):
                self.visit(type(found).forward)
        elif isinstance(found, Mapping):
            # Hooks of caches come and go with them, and change no number.
            items = list(found.items())
            self._visit_items(item for item in items if not isinstance(item[1], Hook))
        elif isinstance(found, list | tuple | AbstractSet):
            self._visit_items(enumerate(found))
        elif isinstance(found, np.ndarray) and not found.dtype.hasobject:
            # A copy of the bytes, since torch refuses negative strides and read-only memory.
            self.values.append((str(found.dtype), found.shape))
            self.tensors.append(torch.from_numpy(np.frombuffer(found.tobytes(), np.uint8).copy()))
        elif _is_record(found):
            self._visit_items(list(vars(found).items()))
        else:
            self.objects.append(found)
            self.values.append(id(found))

    def _visit_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        for name, value in items:
            self.visit(name)
            self.visit(value)
        self.values.append("end")

    def _visit_tensor(self, tensor: torch.Tensor) -> None:
        version = 0 if tensor.is_inference() else tensor._version
        self.values.append((tensor.dtype, tensor.shape, version))
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self.visit(getattr(tensor, name))
        elif tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
            # Bits that cannot be read count as changed.
            self.values.append(object())
        else:
            self.tensors.append(tensor)


def _is_record(found: object) -> bool:
    """Whether an object is no more than its attributes."""
    return isinstance(found, SimpleNamespace) or (
        is_dataclass(found) and not isinstance(found, type) and hasattr(found, "__dict__")
    )


def turns_with_length(model: PreTrainedModel) -> bool:
    """Whether angles depend on how long a text is, so that a longer one that begins alike has other keys."""
    config = model.config.get_text_config(decoder=True)
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Models whose kinds of layers turn differently have parameters for each kind.
    kinds = [one for one in parameters.values() if isinstance(one, Mapping)] or [parameters]
    return any(one.get("rope_type") in _TURNS_WITH_LENGTH for one in kinds)

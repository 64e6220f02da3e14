"""Fingerprint of everything in a model that its keys and values depend on; decides if cached prefixes are valid."""

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel

from torch_bridge.own_forward import OwnForward
from torch_bridge.transformers_cache.checksum import checksums
from torch_bridge.transformers_cache.watch import Hook

_TURNS_WITH_LENGTH = ("dynamic", "longrope")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_PLAIN_TYPES = frozenset(_PLAIN)
_DICTS = frozenset((dict, OrderedDict))
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
    """State of a model at one moment. If two are equal, the same tokens give the same keys.

    Attributes:
        values: structure and plain attributes, and the `id` of each object that is compared by identity.
        sums: checksums of the bits of all tensors.
        objects: the objects compared by identity, kept alive so that their `id` is not reused.
    """

    values: tuple[Any, ...]
    sums: tuple[int, ...]
    objects: tuple[object, ...] = field(compare=False)


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """Returns the model's fingerprint, which changes if the same tokens may give other keys.

    It covers every element of all parameters, buffers, other tensors and NumPy arrays of the modules; their plain
    attributes, and containers, dataclasses and namespaces of them; configs, training mode, structure and autocast; and
    the `forward` of the modules' classes. Hooks, replaced functions and all other objects are compared by identity. A
    change inside such an object (a closure, for example) or of global state is not seen. All weights are read once, and
    the host waits for the result.
    """
    reading = _Reading()
    reading.visit(model)
    reading.values.append(autocast())
    return Fingerprint(tuple(reading.values), checksums(reading.tensors), tuple(reading.objects))


def autocast() -> tuple[torch.dtype | None, ...]:
    """Returns the dtype of autocast on CPUs and on GPUs, in this thread; `None` where it is off."""
    kinds = ("cpu", "cuda")
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in kinds
    )


def structure(model: torch.nn.Module) -> Fingerprint:
    """Returns the fingerprint with the tensors' addresses, strides and devices in place of their bits.

    It changes if a recording of the model's forward would compute something else than the forward. The weights are not
    read. It keeps the tensors alive, so that no other tensor takes an address meanwhile.
    """
    reading = _Reading(reads_bits=False)
    reading.visit(model)
    settings = (torch.get_float32_matmul_precision(), torch.get_default_dtype())
    return Fingerprint((*reading.values, *settings), (), tuple(reading.objects))


class _Reading:
    """Accumulates the parts of a `Fingerprint` while it walks the model's attributes in order.

    Args:
        reads_bits: whether tensors are collected for a checksum; otherwise their addresses become values.
    """

    def __init__(self, *, reads_bits: bool = True) -> None:
        self._reads_bits = reads_bits
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
        if type(found) in _DICTS:
            self._visit_mapping(found)
        elif isinstance(found, torch.Tensor):
            self._visit_tensor(found)
        elif isinstance(found, torch.nn.Module | PreTrainedConfig):
            # A copy, since another thread may add hooks to the model during the walk.
            items = list(vars(found).items())
            self._visit_items(_without_own(item for item in items if item[0] not in _MACHINERY))
            if isinstance(found, torch.nn.Module):
                self.visit(type(found).forward)
        elif isinstance(found, Mapping):
            self._visit_mapping(found)
        elif isinstance(found, list | tuple | AbstractSet):
            self._visit_items(enumerate(found))
        elif isinstance(found, np.ndarray) and not found.dtype.hasobject:
            # A copy of the bytes, since torch refuses negative strides and read-only memory.
            self.values.append((str(found.dtype), found.shape))
            raw = np.frombuffer(found.tobytes(), np.uint8).copy()
            if self._reads_bits:
                self.tensors.append(torch.from_numpy(raw))
            else:
                self.values.append(zlib.crc32(raw))
        elif _is_record(found):
            self._visit_items(list(vars(found).items()))
        else:
            self.objects.append(found)
            self.values.append(id(found))

    def _visit_mapping(self, found: Mapping[Any, Any]) -> None:
        # A cache's own hooks do not change what the model computes.
        items = [item for item in list(found.items()) if not isinstance(item[1], Hook)]
        self._visit_items(items)

    def _visit_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        # Most of a model's attributes are plain, and this runs for each new text.
        append, visit = self.values.append, self.visit
        for name, value in items:
            if type(name) in _PLAIN_TYPES:
                append(name)
            else:
                visit(name)
            if type(value) in _PLAIN_TYPES:
                append(value)
            else:
                visit(value)
        append("end")

    def _visit_tensor(self, tensor: torch.Tensor) -> None:
        version = 0 if tensor.is_inference() or not self._reads_bits else tensor._version
        self.values.append((tensor.dtype, tensor.shape, version))
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self.visit(getattr(tensor, name))
        elif tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
            # The bits cannot be read, so a new object makes the fingerprint differ from every other.
            self.values.append(object())
        elif self._reads_bits:
            self.tensors.append(tensor)
        else:
            self.values.append((tensor.data_ptr(), tensor.stride(), tensor.device))
            self.objects.append(tensor)


def _without_own(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields attributes without a cache's own `forward`, which changes nothing that the model computes."""
    for name, value in items:
        if not isinstance(value, OwnForward):
            yield name, value
        elif value.inner is not None:
            yield name, value.inner


def _is_record(found: object) -> bool:
    """Whether an object is a plain record of attributes: a namespace or a dataclass instance."""
    return isinstance(found, SimpleNamespace) or (
        is_dataclass(found) and not isinstance(found, type) and hasattr(found, "__dict__")
    )


def turns_with_length(model: PreTrainedModel) -> bool:
    """Whether rotary angles depend on the length of the text, so that a shared prefix does not mean equal keys."""
    config = model.config.get_text_config(decoder=True)
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Models with different rotary settings per layer type have one mapping per type.
    kinds = [one for one in parameters.values() if isinstance(one, Mapping)] or [parameters]
    return any(one.get("rope_type") in _TURNS_WITH_LENGTH for one in kinds)

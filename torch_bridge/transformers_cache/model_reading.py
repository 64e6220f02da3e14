"""`ModelReading`: everything in a model that its keys and values depend on, as values, tensors and objects."""

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from itertools import chain
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

from torch_bridge.own_forward import OwnForward
from torch_bridge.transformers_cache.watch import Hook

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


class ModelReading:
    """Walks a model's attributes in order.

    Args:
        model: the model. The reading keeps all that it has visited, so that nothing new takes an old `id`.

    Attributes:
        values: structure, plain attributes, dtypes and shapes of tensors, bytes of NumPy arrays as checksums, and the
            `id` of each object that is compared by identity.
        tensors: the tensors whose bits can be read.
        objects: the objects compared by identity.
        can_compare: whether `still_holds` can be True.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.values: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.objects: list[object] = []
        self._visited: dict[int, tuple[int, object]] = {}
        self._holders: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._others: list[Iterable[Any]] = []
        self._kinds: dict[type[Any], object] = {}
        self.can_compare = True
        self._visit(model)
        self._sizes, self._contents = self._read_contents()
        self._forms = self._read_forms()

    def still_holds(self) -> bool:
        """Whether another walk would read the same, apart from the bits and places of tensors.

        All objects that were visited must hold the very same objects. It costs a tenth of a walk. The result is False
        also for models with objects that cannot be compared so, such as NumPy arrays, and for equal values that are
        other objects.
        """
        if not self.can_compare:
            return False
        sizes, contents = self._read_contents()
        return (
            sizes == self._sizes
            and all(map(is_, contents, self._contents))
            and self._read_forms() == self._forms
        )

    def versions(self) -> tuple[int, ...]:
        """Returns how often each tensor was written, as torch counts."""
        return tuple(0 if one.is_inference() else one._version for one in self.tensors)

    def places(self) -> tuple[Any, ...]:
        """Returns address, strides and device of each tensor."""
        return tuple((one.data_ptr(), one.stride(), one.device) for one in self.tensors)

    def _read_contents(self) -> tuple[list[int], list[Any]]:
        """Returns the size of each container, and what all of them hold, one after the other."""
        dicts = [*map(vars, self._holders), *self._dicts]
        held = [*dicts, *self._others]
        kinds = self._kinds
        parts = [
            dicts,
            map(type, self._holders),
            chain.from_iterable(held),
            chain.from_iterable(map(dict.values, dicts)),
            (kind.forward for kind in kinds),
        ]
        return list(map(len, held)), list(chain.from_iterable(parts))  # pyright: ignore[reportArgumentType]

    def _read_forms(self) -> list[Any]:
        return [(one.dtype, one.shape) for one in self.tensors]

    def _visit(self, found: Any) -> None:  # noqa: ANN401 - an attribute may be anything
        if isinstance(found, _PLAIN):
            self.values.append(found)
            return
        known = id(found) in self._visited
        place, _ = self._visited.setdefault(id(found), (len(self._visited), found))
        self.values.append((type(found), place))
        if known:
            return
        if type(found) in _DICTS:
            self._dicts.append(found)
            self._visit_mapping(found)
        elif isinstance(found, torch.Tensor):
            self._visit_tensor(found)
        elif isinstance(found, torch.nn.Module | PreTrainedConfig):
            self._holders.append(found)
            # A copy, since another thread may add hooks to the model during the walk.
            items = list(vars(found).items())
            self._visit_items(self._without_own(one for one in items if one[0] not in _MACHINERY))
            if isinstance(found, torch.nn.Module):
                self._kinds[type(found)] = None
                self._visit(type(found).forward)
        elif isinstance(found, Mapping):
            self.can_compare = False
            self._visit_mapping(found)
        elif isinstance(found, list | tuple | AbstractSet):
            self._others.append(found)
            self._visit_items(enumerate(found))
        elif isinstance(found, np.ndarray) and not found.dtype.hasobject:
            self.can_compare = False
            self.values.append((str(found.dtype), found.shape, zlib.crc32(found.tobytes())))
        elif _is_record(found):
            self._holders.append(found)
            self._visit_items(list(vars(found).items()))
        else:
            self.objects.append(found)
            self.values.append(id(found))

    def _visit_mapping(self, found: Mapping[Any, Any]) -> None:
        # A cache's own hooks do not change what the model computes.
        items = [item for item in list(found.items()) if not isinstance(item[1], Hook)]
        self._visit_items(items)

    def _visit_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        # Most of a model's attributes are plain.
        append, visit = self.values.append, self._visit
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
        self.values.append((tensor.dtype, tensor.shape))
        if is_traceable_wrapper_subclass(tensor):
            self.can_compare = False
            for name in tensor.__tensor_flatten__()[0]:
                self._visit(getattr(tensor, name))
        elif tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
            self.can_compare = False
            # The bits cannot be read, so a new object makes the reading differ from every other.
            self.values.append(object())
        else:
            self.tensors.append(tensor)

    def _without_own(self, items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yields attributes without a cache's own `forward`, which changes nothing that the model computes."""
        for name, value in items:
            if not isinstance(value, OwnForward):
                yield name, value
                continue
            self._holders.append(value)
            if value.inner is not None:
                yield name, value.inner


def _is_record(found: object) -> bool:
    """Whether an object is a plain record of attributes: a namespace or a dataclass instance."""
    return isinstance(found, SimpleNamespace) or (
        is_dataclass(found) and not isinstance(found, type) and hasattr(found, "__dict__")
    )

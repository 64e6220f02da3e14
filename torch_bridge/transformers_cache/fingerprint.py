"""Fingerprint of everything in a model that its keys and values depend on; decides if cached prefixes are valid."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from torch_bridge.transformers_cache.checksum import begin_checksums, sum_on_device
from torch_bridge.transformers_cache.model_reading import ModelReading

_TURNS_WITH_LENGTH = ("dynamic", "longrope")


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


class KnownModel:
    """A model whose fingerprint is asked for again and again; it is walked anew only if it holds other objects.

    Args:
        model: the model.
        sum_tensors: computes the checksum of tensors on a device.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sum_tensors: Callable[[Sequence[torch.Tensor]], torch.Tensor] = sum_on_device,
    ) -> None:
        self._model, self._sum_tensors = model, sum_tensors
        self._latest: ModelReading | None = None

    def begin_fingerprint(self) -> Callable[[], Fingerprint]:
        """Queues the checksums on torch's current stream; returns a function that waits for them.

        The function returns the model's fingerprint, which changes if the same tokens may give other keys. The bits are
        those at this call, all else is read when the function is called.

        It covers every element of all parameters, buffers, other tensors and NumPy arrays of the modules; their plain
        attributes, and containers, dataclasses and namespaces of them; configs, training mode, structure and autocast;
        and the `forward` of the modules' classes. Hooks, replaced functions and all other objects are compared by
        identity. A change inside such an object (a closure, for example) or of global state is not seen. All weights
        are read once.
        """
        latest = self._latest
        reading = latest if latest is not None and latest.can_compare else self._read()
        sums = begin_checksums(reading.tensors, self._sum_tensors)

        def finish() -> Fingerprint:
            now = self._read() if reading is latest else reading
            read = sums if now is reading else begin_checksums(now.tensors, self._sum_tensors)
            values = (*now.values, *now.versions(), autocast())
            return Fingerprint(values, read(), tuple(now.objects))

        return finish

    def structure(self) -> Fingerprint:
        """Returns the fingerprint with the tensors' addresses, strides and devices in place of their bits.

        It changes if a recording of the model's forward would compute something else than the forward. The weights are
        not read. It keeps the tensors alive, so that no other tensor takes an address meanwhile.
        """
        reading = self._read()
        settings = (torch.get_float32_matmul_precision(), torch.get_default_dtype())
        values = (*reading.values, *reading.places(), *settings)
        return Fingerprint(values, (), (*reading.objects, *reading.tensors))

    def _read(self) -> ModelReading:
        if self._latest is None or not self._latest.still_holds():
            self._latest = ModelReading(self._model)
        return self._latest


def autocast() -> tuple[torch.dtype | None, ...]:
    """Returns the dtype of autocast on CPUs and on GPUs, in this thread; `None` where it is off."""
    kinds = ("cpu", "cuda")
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in kinds
    )


def turns_with_length(model: PreTrainedModel) -> bool:
    """Whether rotary angles depend on the length of the text, so that a shared prefix does not mean equal keys."""
    config = model.config.get_text_config(decoder=True)
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    # Models with different rotary settings per layer type have one mapping per type.
    kinds = [one for one in parameters.values() if isinstance(one, Mapping)] or [parameters]
    return any(one.get("rope_type") in _TURNS_WITH_LENGTH for one in kinds)

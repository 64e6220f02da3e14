"""`RecordedSum`: the checksum of the same tensors again and again, replayed as one graph.

The weights of a model are some hundred tensors, and to launch the work on each takes longer than to read it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.graphs.recorder import Pools, Recorded, Recorder
from torch_bridge.graphs.replay_order import ReplayOrder
from torch_bridge.transformers_cache.checksum import sum_on_device


class RecordedSum:
    """Computes `sum_on_device`; from the second time that the same memory is summed, by a replay.

    Args:
        recorder: records the work; `None` if nothing is recorded.
        order: the order of the recorder's replays.

    Attributes:
        is_recorded: whether a recording is held.
    """

    def __init__(self, recorder: Recorder | None, order: ReplayOrder) -> None:
        self._recorder, self._order = recorder, order
        self._places: list[list[Any]] = []
        self._work: Recorded | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether a recording holds memory."""
        return self._work is not None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the checksum of all tensors and their order, int64 of shape ().

        The next replay of this recorder may overwrite it, also one of other work.

        Args:
            tensors: dense tensors on one device.
        """
        places = _places(tensors)
        if places != self._places:
            self._places, self._work = places, None
            return sum_on_device(tensors)
        if self._recorder is None or not _is_current(tensors[0].device):
            return sum_on_device(tensors)
        self._order.follow()
        if self._work is None:
            try:
                self._work = self._recorder.record(lambda _: [sum_on_device(tensors)], _NO_POOLS)
            except RuntimeError:
                # Memory is short, or another thread has broken the capture. It costs time alone.
                self._places = []
                return sum_on_device(tensors)
        (found,) = self._work.replay(_NO_POOLS)
        return found


_NO_POOLS: Pools = {}


def _places(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Returns what decides which bytes a recording reads for the tensors, and how."""
    kinds = (
        torch.Tensor.data_ptr,
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.Tensor.is_conj,
        torch.Tensor.is_neg,
    )
    return [[one.dtype for one in tensors], *(list(map(kind, tensors)) for kind in kinds)]


def _is_current(device: torch.device) -> bool:
    return device.type != "cuda" or device.index == torch.cuda.current_device()

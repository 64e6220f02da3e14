"""Recorders: they run a function of pools once and return its device work as one replayable unit.

`CudaRecorder` captures a CUDA graph. Any other object with the same methods may take its place.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from jaxkv.memory import without_garbage_collection
from torch_bridge.graphs.capture_stream import CaptureStream

Pools = Mapping[str, torch.Tensor]
"""Leased tensors by name. They are not kept."""
Results = list[torch.Tensor]
Recordable = Callable[[Pools], Results]
"""A function of the pools. It must do the same device work at each call."""

_ONE_AT_A_TIME = threading.Lock()
_RECORDS: list[int] = []
"""Id of the thread that records."""
_UNENDED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture could not be ended. Torch's allocators keep pointers to them."""


class Recorded(Protocol):
    """The recorded work of one function."""

    def replay(self, pools: Pools) -> Results:
        """Queues the work on torch's current stream and returns the results, which the next replay overwrites."""
        ...


class Recorder(Protocol):
    """Records functions whose replays never run at the same time."""

    def record(self, function: Recordable, pools: Pools) -> Recorded:
        """Calls the function, at least once, and returns its work.

        Raises:
            RuntimeError: the function cannot be recorded, or memory ran out. Nothing is kept.
        """
        ...

    def num_bytes(self) -> int:
        """Returns the device memory that recordings hold for temporaries and results."""
        ...


class CudaGraph:
    """A captured CUDA graph, with the results that it writes, and its capture's stream, whose workspace it uses."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, results: Results, stream: CaptureStream
    ) -> None:
        self._graph, self._results, self._stream = graph, results, stream

    def replay(self, pools: Pools) -> Results:
        """Launches the graph. It uses the pools' addresses at the time of the recording."""
        self._graph.replay()
        return self._results


class CudaRecorder:
    """Captures CUDA graphs, which share one private memory pool of torch.

    Args:
        device: the GPU, which must be torch's current device in each call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream: CaptureStream | None = None
        self._living: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def record(self, function: Recordable, pools: Pools) -> CudaGraph:
        """Calls the function twice: on torch's current stream, which loads its kernels, and in the capture.

        Other threads may use the GPU meanwhile, except that torch refuses to draw random numbers on it during the
        capture, in any thread, and a wait for the whole device in another thread fails and breaks the capture.

        Raises:
            RuntimeError: as `Recorder.record`, or this thread records already.
        """
        with _alone():
            function(pools)
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            if self._stream is None:
                self._stream = CaptureStream(self._device)
            # A finalizer may call JAX, which must not happen inside a capture.
            with torch.cuda.stream(self._stream.stream), without_garbage_collection():
                return self._capture(function, pools, self._stream)

    def _capture(self, function: Recordable, pools: Pools, stream: CaptureStream) -> CudaGraph:
        if not self._living:
            # Torch refuses to use a pool again whose graphs are all gone.
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Only this thread is restricted to work that can be captured.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            results = function(pools)
        except BaseException:
            with suppress(RuntimeError):
                self._end(graph)
            raise
        self._end(graph)
        made = CudaGraph(graph, results, stream)
        self._living.add(made)
        return made

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture; if that fails, undoes what `capture_begin` has changed in torch.

        Work that cannot be captured invalidates a capture. `capture_end` then raises before it tells the allocator
        and the random generator.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            _UNENDED.append(graph)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._memory)
                torch._C._cuda_releasePool(self._device.index, self._memory)
            # The end of any capture resets the generator.
            spare = torch.cuda.CUDAGraph()
            spare.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self._device)
            spare.capture_end()
            raise

    def num_bytes(self) -> int:
        """Returns the size of the private memory pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(
            segment["total_size"]
            for segment in segments
            if tuple(segment["segment_pool_id"]) == tuple(self._memory)
        )


def recorder_for(device: torch.device) -> Recorder | str:
    """Returns a recorder for a device, or the reason why there is none."""
    if device.type != "cuda":
        return f"the model is on {device}, and CUDA graphs need a GPU"
    return CudaRecorder(device)


@contextmanager
def _alone() -> Iterator[None]:
    """Waits for other threads' recordings. Raises `RuntimeError` inside a recording, where it would wait for ever."""
    if threading.get_ident() in _RECORDS:
        raise RuntimeError("a decode step was to be recorded inside another one's recording")
    with _ONE_AT_A_TIME:
        _RECORDS.append(threading.get_ident())
        try:
            yield
        finally:
            _RECORDS.clear()

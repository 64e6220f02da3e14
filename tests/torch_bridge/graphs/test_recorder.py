"""`CudaRecorder` on a torch whose CUDA calls are written down: order of the calls, and failures inside a capture."""

import gc
import itertools
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

from torch_bridge.graphs import capture_stream, recorder
from torch_bridge.graphs.recorder import CudaRecorder, recorder_for

pytestmark = pytest.mark.torch


@pytest.fixture
def cuda(monkeypatch):
    """Replaces torch's CUDA calls; `calls` has what was called, and `unendable` makes the next capture's end fail."""

    class Written:
        calls: ClassVar[list] = []
        unendable: ClassVar[bool] = False
        handles: ClassVar = iter(range(6, 99))
        streams: ClassVar = itertools.count(100)

    class Graph:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            assert capture_error_mode == "thread_local"
            Written.calls.append(("begin", pool))

        def capture_end(self):
            Written.calls.append("end")
            if Written.unendable:
                Written.unendable = False
                raise RuntimeError("capture invalidated")

        def replay(self):
            Written.calls.append("replay")

    @contextmanager
    def stream(given):
        Written.calls.append("side stream")
        try:
            yield
        finally:
            Written.calls.append("back")

    fakes = {
        "CUDAGraph": Graph,
        "ExternalStream": lambda pointer, device: pointer,
        "stream": stream,
        "graph_pool_handle": lambda: (0, next(Written.handles)),
        "synchronize": lambda device: Written.calls.append("wait"),
        "empty_cache": lambda: None,
        "memory_snapshot": lambda: [
            {"total_size": 3, "segment_pool_id": (0, 7)},
            {"total_size": 4, "segment_pool_id": (0, 7)},
            {"total_size": 9, "segment_pool_id": (0, 0)},
        ],
    }
    monkeypatch.setattr(capture_stream, "_new_stream", lambda: next(Written.streams))
    monkeypatch.setattr(capture_stream, "_FREE", {})
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C,
            name,
            lambda *args, name=name: Written.calls.append((name, *args)),
            raising=False,
        )
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    monkeypatch.setattr(recorder, "_UNENDED", [])
    return Written


DEVICE = torch.device("cuda", 3)
POOLS = {"layer0.key": torch.ones(2)}


def test_a_function_runs_before_and_inside_the_capture_without_garbage_collection(cuda):
    def function(pools):
        cuda.calls.append(("run", gc.isenabled()))
        return [pools["layer0.key"]]

    made = CudaRecorder(DEVICE)
    work = made.record(function, POOLS)
    assert cuda.calls == [
        ("run", True), "wait", "side stream", ("begin", (0, 7)), ("run", False), "end", "back",
    ]  # fmt: skip
    assert gc.isenabled()
    assert work.replay(POOLS)[0] is POOLS["layer0.key"]
    assert cuda.calls[-1] == "replay"
    assert made.num_bytes() == 7


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), KeyboardInterrupt()])
@pytest.mark.parametrize("unendable", [False, True])
def test_a_failure_inside_the_capture_ends_it_and_is_raised(cuda, error, unendable):
    def function(pools):
        if "side stream" in cuda.calls:
            cuda.unendable = unendable
            raise error
        return []

    with pytest.raises(type(error)):
        CudaRecorder(DEVICE).record(function, POOLS)
    assert gc.isenabled()
    begun = cuda.calls.index(("begin", (0, 7)))
    repair = [
        ("_cuda_endAllocateToPool", 3, (0, 7)), ("_cuda_releasePool", 3, (0, 7)), ("begin", None), "end",
    ]  # fmt: skip
    assert cuda.calls[begun + 1 :] == ["end", *(repair if unendable else []), "back"]
    assert len(recorder._UNENDED) == unendable
    assert (
        len(CudaRecorder(DEVICE).record(lambda pools: [POOLS["layer0.key"]], POOLS)._results) == 1
    )


def test_living_graphs_share_one_pool_and_a_new_one_begins_once_all_are_gone(cuda):
    made = CudaRecorder(DEVICE)
    works = [made.record(lambda pools: [], POOLS) for _ in range(2)]
    works.pop(0)
    works.append(made.record(lambda pools: [], POOLS))
    works.clear()
    made.record(lambda pools: [], POOLS)
    begun = [call[1] for call in cuda.calls if call[0] == "begin"]
    assert begun == [(0, 7)] * 3 + [(0, 8)]


def test_a_recording_inside_a_recording_is_refused_and_the_next_is_made(cuda):
    made = CudaRecorder(DEVICE)
    with pytest.raises(RuntimeError, match="inside another one's recording"):
        made.record(lambda pools: made.record(lambda pools: [], POOLS), POOLS)
    made.record(lambda pools: [], POOLS)


def test_a_capture_that_cannot_be_ended_is_an_error(cuda):
    cuda.unendable = True
    with pytest.raises(RuntimeError, match="capture invalidated"):
        CudaRecorder(DEVICE).record(lambda pools: [], POOLS)


def test_a_gpu_has_a_recorder_and_a_cpu_a_reason(cuda):
    assert isinstance(recorder_for(DEVICE), CudaRecorder)
    assert "CUDA graphs need a GPU" in recorder_for(torch.device("cpu"))


def test_graphs_have_their_recorders_stream_to_themselves_until_the_last_is_gone(cuda):
    device = torch.device("cuda", 0)
    first, second = CudaRecorder(device), CudaRecorder(device)
    graphs = [one.record(lambda pools: [], {}) for one in (first, first, second)]
    streams = [graph._stream.stream for graph in graphs]
    assert streams[0] == streams[1] != streams[2]
    del first, second
    del graphs[1:]
    gc.collect()
    assert list(capture_stream._FREE.values()) == [[streams[2]]]
    third, fourth = (CudaRecorder(device) for _ in range(2))
    again = [one.record(lambda pools: [], {}) for one in (third, fourth)]
    assert again[0]._stream.stream == streams[2]
    assert again[1]._stream.stream not in streams
    graphs.clear()
    assert list(capture_stream._FREE.values()) == [[streams[0]]]

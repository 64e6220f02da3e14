"""Replayed checksums: those of the same work, for whatever bits the same memory holds."""

import pytest
import torch

from tests.torch_bridge.graphs.frozen import FrozenRecorder
from torch_bridge.graphs.recorded_sum import RecordedSum
from torch_bridge.graphs.replay_order import ReplayOrder
from torch_bridge.transformers_cache.checksum import sum_on_device

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


@pytest.fixture
def parts():
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (n,), generator=draw, dtype=torch.uint8) for n in (5, 70_000)]


def test_it_is_recorded_the_second_time_and_follows_the_bits(parts):
    recorder = FrozenRecorder()
    summed = RecordedSum(recorder, ReplayOrder(CPU))
    assert int(summed(parts)) == int(sum_on_device(parts))
    assert not summed.is_recorded
    for part in parts:
        part[-1] += 1
        assert int(summed(parts)) == int(sum_on_device(parts))
    assert recorder.num_recorded == 1


def test_other_memory_is_not_summed_by_the_recording_of_the_first(parts):
    summed = RecordedSum(FrozenRecorder(), ReplayOrder(CPU))
    wanted = [int(summed(parts)) for _ in range(2)]
    assert summed.is_recorded
    moved = [part.clone() for part in parts]
    moved[1][0] += 1
    assert int(summed(moved)) == int(sum_on_device(moved)) != wanted[0]
    assert not summed.is_recorded


@pytest.mark.parametrize("turned", [torch.Tensor.t, torch.Tensor.conj])
def test_the_same_memory_read_in_another_way_is_not_summed_by_the_recording(turned):
    whole = torch.randn(3, 5, dtype=torch.complex64)
    summed = RecordedSum(FrozenRecorder(), ReplayOrder(CPU))
    for _ in range(2):
        assert int(summed([whole])) == int(sum_on_device([whole]))
    assert int(summed([turned(whole)])) == int(sum_on_device([turned(whole)]))
    assert int(sum_on_device([turned(whole)])) != int(sum_on_device([whole]))


def test_a_recording_that_fails_costs_no_checksum_and_is_tried_again(parts):
    class Failing(FrozenRecorder):
        def record(self, function, pools):
            self.num_recorded += 1
            if self.num_recorded > 1:
                return super().record(function, pools)
            function(pools)
            raise torch.OutOfMemoryError("no memory")

    summed = RecordedSum(Failing(), ReplayOrder(CPU))
    said = [int(summed(parts)) for _ in range(4)]
    assert said == [int(sum_on_device(parts))] * 4
    assert summed.is_recorded

"""Each replica has devices of its own, and too few GPUs are refused before anything is loaded."""

import pytest

from jaxkv.replicas import devices
from jaxkv.replicas.devices import replica_count, replica_environments, visible_gpus


@pytest.fixture
def four(tmp_path):
    """A folder of device files of four GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    return tmp_path


def test_the_gpus_that_a_process_sees_are_found_without_a_driver(four, tmp_path):
    assert visible_gpus({}, four) == ["0", "1", "2", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2,GPU-8a"}, four) == ["2", "GPU-8a"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, four) == []
    assert visible_gpus({"JAX_PLATFORMS": "cuda,cpu"}, four) == ["0", "1", "2", "3"]
    assert visible_gpus({"JAX_PLATFORMS": "cpu"}, four) is None
    assert visible_gpus({}, tmp_path / "none") is None


def test_replicas_take_the_gpus_in_turn(monkeypatch):
    monkeypatch.setattr(devices, "visible_gpus", lambda environment: ["4", "5", "6", "7"])
    assert replica_environments(2, 2) == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    with pytest.raises(ValueError, match="needs 6 GPUs, and 4 are visible here"):
        replica_environments(3, 2)


def test_without_gpus_each_replica_has_a_cpu_of_its_own(monkeypatch):
    monkeypatch.setattr(devices, "visible_gpus", lambda environment: None)
    assert replica_environments(2, 4) == [{"JAX_NUM_CPU_DEVICES": "4"}] * 2


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_number_of_replicas_that_makes_no_sense_is_refused(count):
    with pytest.raises(ValueError, match=r"data_parallel_size must be an int in \[1, 64\]"):
        replica_count(count)

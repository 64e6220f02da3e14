"""Small blocks of a GPU's pool: who has them, when they are given back, and what they are for."""

import gc
import logging

import jax
import numpy as np
import pytest

from jaxkv.bench.serving import Served
from jaxkv.config.cache import CacheConfig
from jaxkv.runner import model_runner, small_blocks
from jaxkv.runner.small_blocks import SmallBlocks


def test_a_cpu_has_none():
    assert small_blocks.small_blocks(jax.local_devices(backend="cpu")[0]) is None


def test_a_separator_is_kept_behind_each_block_and_the_blocks_are_free(monkeypatch):
    made = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *arrays: made.append(put(*arrays)) or made[-1])
    kept = SmallBlocks(jax.local_devices(backend="cpu")[0]).separators
    assert [pair[1] for pair in made] == kept
    assert {pair[0].is_deleted() for pair in made} == {True}
    sizes = sorted({pair[0].shape[0] for pair in made})
    assert sizes == [256 << step for step in range(15)]
    assert len(made) == 8 * len(sizes)


def test_all_who_hold_those_of_a_device_share_them(monkeypatch):
    made = []
    monkeypatch.setattr(small_blocks, "_PLATFORM", "cpu")
    monkeypatch.setattr(SmallBlocks, "__init__", lambda self, gpu: made.append(gpu))
    one, other, *_ = jax.local_devices(backend="cpu")
    first = small_blocks.small_blocks(one)
    assert small_blocks.small_blocks(one) is first
    assert small_blocks.small_blocks(other) is not first
    assert made == [one, other]
    del first
    gc.collect()
    assert small_blocks.small_blocks(one) is not None
    assert made == [one, other, one]


def test_a_pool_without_room_is_told_and_any_other_error_is_raised(monkeypatch, caplog):
    kinds = ["RESOURCE_EXHAUSTED", "INTERNAL"]

    def fails(self, gpu):
        raise jax.errors.JaxRuntimeError(f"{kinds.pop(0)}: x")

    monkeypatch.setattr(small_blocks, "_PLATFORM", "cpu")
    monkeypatch.setattr(SmallBlocks, "__init__", fails)
    [device, *_] = jax.local_devices(backend="cpu")
    with caplog.at_level(logging.WARNING):
        assert small_blocks.small_blocks(device) is None
    assert "lower memory_share" in caplog.text
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        small_blocks.small_blocks(device)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_runner_holds_those_of_its_devices_until_it_is_closed(monkeypatch, devices):
    held = {}

    def blocks(device):
        held[device] = held.get(device, 0) + 1
        return Held(device)

    class Held:
        def __init__(self, device):
            self.device = device

        def __del__(self):
            held[self.device] -= 1

    monkeypatch.setattr(model_runner, "small_blocks", blocks)
    runner = (
        Served(
            shape="tiny",
            dtype="float32",
            max_model_len=64,
            cache=CacheConfig(max_sequences=2),
            tensor_parallel_size=devices,
        )
        .build()
        .runner
    )
    assert held == dict.fromkeys(jax.devices()[:devices], 1)
    runner.close()
    gc.collect()
    assert held == dict.fromkeys(jax.devices()[:devices], 0)


@pytest.mark.gpu
def test_small_arrays_take_no_memory_of_large_ones():
    """Without the blocks they take the beginning of the free block, and the next large array lies behind them."""
    [gpu, *_] = jax.local_devices()
    kept = SmallBlocks(gpu)

    def place():
        array = jax.block_until_ready(jax.device_put(np.zeros(64 * 2**20, np.uint8), gpu))
        found = array.unsafe_buffer_pointer()
        array.delete()
        return found

    free = place()
    small = [jax.device_put(np.zeros(size, np.uint8), gpu) for size in (300, 60_000, 2_200_000) * 4]
    assert place() == free
    del small, kept

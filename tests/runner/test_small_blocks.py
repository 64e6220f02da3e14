"""Small blocks of a GPU's pool: small arrays are placed in them, large ones are not."""

import jax
import numpy as np
import pytest

from jaxkv.runner.small_blocks import reserve_small_blocks


def address(array):
    return array.unsafe_buffer_pointer()


def test_a_cpu_keeps_no_blocks():
    assert reserve_small_blocks(jax.local_devices(backend="cpu")) == []


@pytest.mark.gpu
def test_small_arrays_are_placed_in_the_blocks_and_large_ones_are_not():
    [gpu, *_] = jax.local_devices()
    separators = reserve_small_blocks([gpu])
    low, high = min(map(address, separators)), max(map(address, separators))
    small = [jax.device_put(np.zeros(size, np.uint8), gpu) for size in (300, 60_000, 2_200_000) * 4]
    large = jax.device_put(np.zeros(64 * 2**20, np.uint8), gpu)
    assert [low < address(array) < high for array in small] == [True] * len(small)
    assert not low < address(large) < high

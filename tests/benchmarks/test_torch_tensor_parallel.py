"""The torch decoder over several devices generates what it does on one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxkv.bench.shapes import SHAPES

pytestmark = pytest.mark.torch
DEVICES = 2


def test_the_parts_of_two_devices_generate_the_tokens_of_one():
    """Two threads stand in for two processes; each decoder's sums meet at a barrier."""
    import torch

    from benchmarks.torch_tensor_parallel import make_decoder

    config, parts = SHAPES["tiny"], {}
    prompts = np.random.default_rng(3).integers(0, config.vocab_size, (2, 9))

    def generated(rank, devices, barrier):
        def joined(part):
            parts[rank] = part
            barrier.wait()
            total = sum(parts[each] for each in range(devices))
            barrier.wait()
            return total

        device = torch.device("cpu")
        decoder = make_decoder(config, 2, 16, rank, devices, device, joined)
        assert len(decoder.weights["layers"][0]["qkv"]) * devices == 128
        return [decoder.prefill(prompts), *(decoder.step(9 + at) for at in range(5))]

    wanted = generated(0, 1, threading.Barrier(1))
    barrier = threading.Barrier(DEVICES, timeout=60)
    with ThreadPoolExecutor(DEVICES) as threads:
        for found in threads.map(lambda rank: generated(rank, DEVICES, barrier), range(DEVICES)):
            np.testing.assert_array_equal(found, wanted)

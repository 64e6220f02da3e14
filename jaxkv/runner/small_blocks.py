"""Free blocks for small arrays in a GPU's pool, so that these do not move the temporary memory of programs.

JAX's allocator gives an array the smallest free block that can hold it. A step's packed arrays and tokens are small. If
no small block is free, they take the beginning of the block in which programs have their temporary memory, which then
lies elsewhere in each step. Before a launch XLA sets every node of a CUDA graph anew whose addresses have moved, and
records the library's products again, which takes the host milliseconds (`docs/measured.md`, "Sending a step").
"""

from collections.abc import Iterable

import jax
import numpy as np

_SMALLEST, _LARGEST = 256, 4 * 2**20
"""Bytes of the blocks: from the allocator's unit to the packed array of 256 rows with page tables of 4096 pages."""
_OF_EACH = 8
"""Blocks of each size: two steps in flight and the next one, each with up to two packed arrays and its tokens."""


def reserve_small_blocks(devices: Iterable[jax.Device]) -> list[jax.Array]:
    """Leaves free blocks of all small sizes in the pools of GPUs, 64 MiB on each.

    Args:
        devices: devices of this process. Those that are no GPUs are skipped.

    Returns:
        Arrays of 256 bytes between the blocks. While they live, no large array takes the blocks' memory.
    """
    kept: list[jax.Array] = []
    sizes = [_SMALLEST << step for step in range((_LARGEST // _SMALLEST).bit_length())]
    for device in devices:
        if device.platform != "gpu":
            continue
        # The pool hands memory out in order, so a separator lies behind each block.
        pairs = [
            jax.device_put((np.zeros(size, np.uint8), np.zeros(_SMALLEST, np.uint8)), device)
            for size in sizes
            for _ in range(_OF_EACH)
        ]
        jax.block_until_ready(pairs)
        for block, separator in pairs:
            block.delete()
            kept.append(separator)
    return kept

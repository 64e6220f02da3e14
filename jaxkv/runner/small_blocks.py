"""Free blocks for small arrays in a GPU's pool, so that these do not move the temporary memory of programs.

JAX's allocator gives an array the smallest free block that can hold it. A step's packed arrays and tokens are small. If
no small block is free, they take the beginning of the block in which programs have their temporary memory, which then
lies elsewhere in each step. Before a launch XLA sets every node of a CUDA graph anew whose addresses have moved, and
records cuBLAS's products again, which takes the host milliseconds (`docs/measured.md`, "Sending a step").
"""

import logging
from weakref import WeakValueDictionary

import jax
import numpy as np
from jaxlib._jax import Device

from jaxkv.memory import is_out_of_memory

_LOG = logging.getLogger(__name__)

_PLATFORM = "gpu"
_SMALLEST, _LARGEST = 256, 4 * 2**20
"""Bytes of the blocks: from the allocator's unit to the packed array of 256 rows with some 4000 pages each."""
_OF_EACH = 8
"""Blocks of each size, for two steps in flight and the next one: two packed arrays each, and smaller ones of tokens."""


class SmallBlocks:
    """Free blocks of all small sizes in a GPU's pool, 64 MiB in all, which last as long as this object.

    Args:
        gpu: the GPU.

    Raises:
        JaxRuntimeError: the pool has no room; nothing is kept then.
    """

    def __init__(self, gpu: Device) -> None:
        sizes = [_SMALLEST << step for step in range((_LARGEST // _SMALLEST).bit_length())]
        # The pool hands memory out in order, so a separator lies behind each block, and no large array fits between.
        pairs = [
            jax.device_put((np.zeros(size, np.uint8), np.zeros(_SMALLEST, np.uint8)), gpu)
            for size in sizes
            for _ in range(_OF_EACH)
        ]
        jax.block_until_ready(pairs)
        for block, _ in pairs:
            block.delete()
        self.separators = [separator for _, separator in pairs]


_SHARED: WeakValueDictionary[Device, SmallBlocks] = WeakValueDictionary()


def small_blocks(device: Device) -> SmallBlocks | None:
    """Returns the small blocks of a device, the same ones to all who hold them; `None` if it is no GPU or has no room.

    Args:
        device: a device of this process.
    """
    if device.platform != _PLATFORM:
        return None
    blocks = _SHARED.get(device)
    if blocks is None:
        try:
            blocks = _SHARED[device] = SmallBlocks(device)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            _LOG.warning(
                "%s has no room for small free blocks, so sending steps takes longer; lower memory_share or "
                "budget_bytes of the CacheConfig by 64 MiB",
                device,
            )
    return blocks

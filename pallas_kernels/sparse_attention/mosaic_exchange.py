"""What the kernel of `latent_attention` does beside its own work where two blocks gather a token's records together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.latent_kernel.schedule import SLOTS
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.sparse_attention import mosaic_pair

PAIR = 2
"""Blocks that share their gathering: those of 128 heads."""
HALVES = ("lo", "hi")


def number_of(half: str, slot: Any) -> Any:  # noqa: ANN401 - an array or an int
    """Returns which barrier counts the bytes of a half of a tile in a slot."""
    return 2 * slot + HALVES.index(half)


@dataclass(frozen=True)
class PairExchange:
    """The barriers of halves of tiles that come from the other block, and of halves that neither block needs."""

    def scratch(self) -> dict[str, Any]:
        """Returns the scratch buffers that it needs: two words for each barrier that Pallas knows nothing of."""
        free = plgpu.ClusterBarrier(collective_axes=("block",), num_barriers=SLOTS)
        came = plgpu.SMEM((2 * SLOTS * len(HALVES),), jnp.int32)
        return {"came": came, "lo_free_in_both": free, "hi_free_in_both": free}

    def begin(self, refs: Mapping[str, Ref]) -> None:
        """Makes the barriers, before any block of the pair uses one."""
        mosaic_pair.begin(refs["came"])

    def wait(self, refs: Mapping[str, Ref], half: str, slot: int, turn: Array) -> None:
        """Waits for what the other block sends of a half of a tile."""
        mosaic_pair.wait(refs["came"], number_of(half, slot), turn & 1)

    def end(self) -> None:
        """Waits until the blocks need nothing more of each other."""
        mosaic_pair.end()

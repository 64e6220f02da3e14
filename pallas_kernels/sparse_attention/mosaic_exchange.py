"""`Exchange` of the `sparse_attention` kernel: the two blocks of a token's 128 heads gather its records together."""

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
"""Blocks of a cluster that gather together: those of 65 to 128 heads."""
HALVES = ("lo", "hi")


def number_of(half: str, slot: Any) -> Any:  # noqa: ANN401 - an array or an int
    """Returns the index of the barrier that counts the bytes of a half of a tile in a stage."""
    return 2 * slot + HALVES.index(half)


@dataclass(frozen=True)
class PairExchange:
    """Barriers for halves of tiles that arrive from the other block, and for halves that both blocks have released."""

    def scratch(self) -> dict[str, Any]:
        """Returns the shared memory of the exchange: two words per raw mbarrier, and cluster barriers."""
        free = plgpu.ClusterBarrier(collective_axes=("block",), num_barriers=SLOTS)
        came = plgpu.SMEM((2 * SLOTS * len(HALVES),), jnp.int32)
        return {"came": came, "lo_free_in_both": free, "hi_free_in_both": free}

    def begin(self, refs: Mapping[str, Ref]) -> None:
        """Initialises the raw mbarriers and waits until both blocks have done so."""
        mosaic_pair.begin(refs["came"])

    def wait(self, refs: Mapping[str, Ref], half: str, slot: int, turn: Array) -> None:
        """Waits for the other block's part of a half of a tile; `turn` counts the previous uses of the stage."""
        mosaic_pair.wait(refs["came"], number_of(half, slot), turn & 1)

    def end(self) -> None:
        """Waits until neither block accesses the other's shared memory any more."""
        mosaic_pair.end()

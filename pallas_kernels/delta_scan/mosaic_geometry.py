"""Geometry of the `delta_scan` kernels: sizes, limits and shared memory; host code."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments.delta import DeltaSizes
from pallas_kernels.arrays import ArrayOrStruct

SIDE = 64
"""Tokens of a piece, and side of each square that a warpgroup multiplies."""

STAGES = 3
"""Pieces in flight in a block of the scan."""

# Most squares of the state that a warpgroup holds in registers.
_MOST_SQUARES = 2


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernels are specialised for; a unit is 64 components of one head's values.

    Attributes:
        sizes: sizes of the layer.
        dtype: dtype of qkv and outputs.
        state_dtype: dtype of the pool of states.
    """

    sizes: DeltaSizes
    dtype: DTypeLike
    state_dtype: DTypeLike

    @classmethod
    def of(cls, states: ArrayOrStruct, qkv: ArrayOrStruct) -> "Geometry":
        """Returns the geometry of these arrays."""
        return cls(DeltaSizes.of(states, qkv), jnp.dtype(qkv.dtype), jnp.dtype(states.dtype))

    @property
    def squares(self) -> int:
        """Number of squares of 64 components of queries, keys and a unit's state."""
        return self.sizes.key_dim // SIDE

    @property
    def served(self) -> int:
        """Number of value heads that a key head serves."""
        return self.sizes.heads // self.sizes.key_heads

    @property
    def units(self) -> int:
        """Number of units of a head."""
        return self.sizes.value_dim // SIDE

    @property
    def consumers(self) -> int:
        """Warpgroups per block of the scan, each for one unit of the same head."""
        return 2 if self.units % 2 == 0 else 1

    @property
    def blocks(self) -> int:
        """Blocks of the scan per row."""
        return self.sizes.heads * self.units // self.consumers

    @property
    def first_key(self) -> int:
        """First column of the keys in qkv."""
        return self.sizes.key_heads * self.sizes.key_dim

    @property
    def first_value(self) -> int:
        """First column of the values in qkv."""
        return 2 * self.first_key

    def refusal(self, chunk_size: int) -> str | None:
        """Returns why the kernels cannot be built for these sizes, or `None` if they can."""
        if str(self.dtype) not in ("bfloat16", "float16"):
            return f"qkv must be bfloat16 or float16, got {self.dtype}"
        if str(self.state_dtype) not in ("float32", "bfloat16", "float16"):
            return f"states must be float32, bfloat16 or float16, got {self.state_dtype}"
        key_dim, value_dim = self.sizes.key_dim, self.sizes.value_dim
        if key_dim % SIDE or value_dim % SIDE:
            return (
                f"key_dim and value_dim must be multiples of {SIDE}, got {key_dim} and {value_dim}"
            )
        if self.squares > _MOST_SQUARES:
            return f"key_dim must be at most {_MOST_SQUARES * SIDE}, got {key_dim}"
        if self.served > 4:
            return f"a key head must serve at most 4 value heads, got {self.served}"
        if chunk_size % SIDE:
            return f"chunk_size must be a multiple of {SIDE}, got {chunk_size}"
        return None

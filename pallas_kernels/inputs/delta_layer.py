"""Inputs of a gated delta layer for the cases of `delta_scan` and `delta_update`. Imports no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.inputs.mamba_layer import activated, layer
from pallas_kernels.inputs.nan_filled_pages import normal
from pallas_kernels.inputs.nan_filled_states import Rows, nan_filled_pool

# Typical magnitude of a state's elements in a layer with the parameters of `arrays`.
_STATE_SCALE = 0.1


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of a layer.

    Attributes:
        key_heads: heads of queries and keys.
        heads: heads of values.
        key_dim: components of a key.
        value_dim: components of a value.
        decays_per_head: decays of a token per head, 1 or `key_dim`.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    decays_per_head: int = 1

    @property
    def columns(self) -> int:
        """Components of all queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def decays(self) -> int:
        """Decays of a token."""
        return self.heads * self.decays_per_head

    @property
    def state_numbers(self) -> int:
        """Elements of the state of all heads."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def token_numbers(self) -> int:
        """Elements of a token's inputs and outputs."""
        return self.columns + self.decays + self.heads + self.heads * self.value_dim

    def arrays(
        self,
        rng: np.random.Generator,
        rows: Rows,
        read_states: np.ndarray,
        num_states: int,
        *,
        dtype: str,
        stored: str,
    ) -> dict[str, Any]:
        """Returns the ops' arrays by name, without the tables; rates and steps are those of a Mamba-2 layer.

        Args:
            rng: source of all randomness.
            rows: the packed rows.
            read_states: the states that the rows begin with.
            num_states: states of the pool.
            dtype: dtype of the tokens.
            stored: dtype of the pool.
        """
        weights, shape = layer(rng, self.heads), (self.heads, self.key_dim, self.value_dim)
        gates = (rows.tokens, self.heads)
        biases = weights if self.decays == self.heads else layer(rng, self.decays)
        return {
            "a_log": weights["a_log"],
            "dt_bias": biases["dt_bias"],
            "states": nan_filled_pool(rng, read_states, num_states, shape, stored, _STATE_SCALE),
            "qkv": rows.nan_filled(activated(rng, (rows.tokens, self.columns), dtype)),
            "a": rows.nan_filled(normal(rng, (rows.tokens, self.decays), dtype)),
            "b": rows.nan_filled(normal(rng, gates, dtype)),
        }

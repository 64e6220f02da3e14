"""A recurrence as the tests of its ops see it: the ops, the shapes of their arrays, and one token in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.inputs.nan_filled_states import Rows, nan_filled_pool
from tests.pallas_kernels import state_oracle

CHUNK = 8
# The scans' own tolerance in float32: sums of up to 64 products of numbers about 1.
CLOSE: Mapping[str, Any] = {"rtol": 2e-5, "atol": 2e-5}


@dataclass(frozen=True)
class Recurrence:
    """One recurrence.

    Attributes:
        scan: the op over packed rows.
        update: the op over one token of each row.
        reference: the scan's reference.
        layer: shapes of the layer's arrays.
        state: shape of a state.
        tokens: columns of the arrays of tokens.
        out: shape of a token's output.
        step: function of the layer's arrays, a state and a token's arrays, all float64 and by name, that returns the
            next state and the token's output.
    """

    scan: Callable[..., Any]
    update: Callable[..., Any]
    reference: Callable[..., Any]
    layer: Mapping[str, tuple[int, ...]]
    state: tuple[int, ...]
    tokens: Mapping[str, int]
    out: tuple[int, ...]
    step: Callable[..., tuple[np.ndarray, np.ndarray]]

    def inputs(self, rows: Rows, seed: int = 0) -> dict[str, Any]:
        """Draws the scan's arrays by name, in the order of its arguments."""
        rng = np.random.default_rng(seed)
        tables, num_states = rows.tables(rng, CHUNK)
        tokens = {
            name: rows.nan_filled(rng.normal(size=(rows.tokens, width)).astype(np.float32))
            for name, width in self.tokens.items()
        }
        pool = nan_filled_pool(rng, tables["read_states"], num_states, self.state, "float32")
        layer = {
            name: rng.normal(size=shape).astype(np.float32) for name, shape in self.layer.items()
        }
        return layer | {"states": pool} | tokens | tables

    def call(self, inputs: Mapping[str, Any], **options: Any) -> Any:
        """Calls the scan with the pool on the device and everything else as the host has it."""
        return self.scan(**{**inputs, "states": jnp.asarray(inputs["states"])}, **options)

    def oracle(self, inputs: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Output and pool, both float64."""
        layer, tokens = (
            {name: inputs[name].astype(np.float64) for name in names}
            for names in (self.layer, self.tokens)
        )

        def step(state: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
            return self.step(layer, state, {name: array[token] for name, array in tokens.items()})

        shape = (len(next(iter(tokens.values()))), *self.out)
        return state_oracle.recurrence(inputs, shape, step)

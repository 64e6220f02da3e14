"""Inputs of a Mamba-2 layer for the cases of `ssd_scan` and `ssd_update`: parameters and tokens. Imports no JAX."""

import math

import numpy as np

from pallas_kernels.inputs.nan_filled_pages import normal

STATE_SCALE = 0.1
"""Typical magnitude of a state's elements in a layer with the parameters of `layer`."""


def layer(rng: np.random.Generator, heads: int) -> dict[str, np.ndarray]:
    """Returns a layer's parameters as Mamba-2 initialises them: rates of 1 to 16, steps around 0.001 to 0.1."""
    step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), heads))
    return {
        "a_log": np.log(rng.uniform(1, 16, heads)).astype(np.float32),
        "d": rng.standard_normal(heads).astype(np.float32),
        "dt_bias": (step + np.log(-np.expm1(-step))).astype(np.float32),
    }


def activated(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draws values distributed like the output of a convolution with silu; large arrays repeat the first ones."""
    numbers = normal(rng, (min(math.prod(shape), 2**20 - 3),), "float32")
    return np.resize((numbers / (1 + np.exp(-numbers))).astype(dtype), shape)

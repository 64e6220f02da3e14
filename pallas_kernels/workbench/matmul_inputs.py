"""Benchmark inputs of `skinny_matmul`, with the reference's result, and of `gathered_matmul`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.skinny_matmul import reference

_MOST_BYTES = 8 * 2**30


def repeat_weights(inputs: Mapping[str, Any], copies: int) -> tuple[dict, list[dict]]:
    """Returns shared arrays and per-call arrays; each call has its own copy of the weight."""
    arrays = {
        name: jnp.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)
    }
    weight = arrays.pop("weight")
    copies = max(2, min(copies, _MOST_BYTES // weight.nbytes))
    return arrays, [{"weight": jnp.copy(weight)} for _ in range(copies)]


def repeat_choices(inputs: Mapping[str, Any], copies: int) -> tuple[dict, list[dict]]:
    """Returns shared and per-call arrays of `gathered_matmul`; each call chooses other matrices of one weight."""
    arrays = {
        name: jnp.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)
    }
    chosen, groups = arrays.pop("chosen"), inputs["weight"].shape[inputs["group_axis"]]
    return arrays, [{"chosen": (chosen + copy) % groups} for copy in range(copies)]


def answer(inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the reference's result in float32, not rounded to the op's result dtype."""
    arrays = {
        name: jnp.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)
    }
    options = {name: value for name, value in inputs.items() if name not in arrays}
    run = jax.jit(partial(reference.skinny_matmul, **options | {"result": jnp.float32}))
    return [np.asarray(run(**arrays))]

"""Benchmark inputs of the ops with recurrent states: rotated state pools, and the reference's results."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_MOST_BYTES = 8 * 2**30
# Tables of state ids, which are offset to a call's own part of the pool.
_IDS = ("read_states", "write_states", "snapshot_states")
_TOKENS = ("x", "xbc", "dt", "z", "qkv", "a", "b")


def repeat_states(inputs: Mapping[str, Any], copies: int) -> tuple[dict, list[dict]]:
    """Returns shared and per-call arrays; each call has its own states and tokens.

    All states are in one larger pool, as in a cache.
    """
    num_states = len(inputs["states"])
    copies = max(2, min(copies, _MOST_BYTES // inputs["states"].nbytes))
    arrays = {
        name: jnp.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)
    }
    own = []
    for copy in range(copies):
        moved = {
            name: jnp.where(
                arrays[name] < num_states, arrays[name] + copy * num_states, copies * num_states
            )
            for name in _IDS
            if name in arrays
        }
        tokens = {name: jnp.copy(arrays[name]) for name in _TOKENS if name in arrays}
        own.append(moved | tokens)
    shared = {name: value for name, value in arrays.items() if name not in own[0]}
    shared["states"] = jnp.concatenate([shared["states"]] * copies)
    return shared, own


def answer(op: str, inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the reference's outputs and the states that it writes."""
    reference = getattr(import_module(f"pallas_kernels.{op}.reference"), op)
    arrays = {
        name: jnp.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)
    }
    options = {name: value for name, value in inputs.items() if name not in arrays}
    out, pool = jax.jit(partial(reference, **options))(**arrays)
    return [np.asarray(out), np.asarray(pool[_written(inputs)])]


def states_at(
    inputs: Mapping[str, Any], before: Array, after: Array
) -> tuple[list[np.ndarray], bool]:
    """Returns the states that the first call writes, and whether any other state has changed."""
    written = _written(inputs)
    bits = {2: jnp.uint16, 4: jnp.uint32}[before.dtype.itemsize]
    same = [
        jax.lax.bitcast_convert_type(pool, bits).reshape(len(pool), -1) for pool in (before, after)
    ]
    changed = jnp.any(same[0] != same[1], axis=1).at[written].set(False)
    return [np.asarray(after[written])], bool(jnp.any(changed))


def _written(inputs: Mapping[str, Any]) -> np.ndarray:
    """Returns the ids of the states that a call writes: final states of rows with tokens, and snapshots."""
    lengths = np.diff(inputs["cu_q_lens"]) if "cu_q_lens" in inputs else 1
    ids = np.where(lengths > 0, inputs["write_states"], len(inputs["states"]))
    ids = np.concatenate([ids, inputs.get("snapshot_states", ids[:0])])
    return ids[ids < len(inputs["states"])]

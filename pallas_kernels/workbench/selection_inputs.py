"""Benchmark inputs and checks of the selection ops: of keys, of records, of logits and of experts.

Two correct selections may differ where scores or sums are equal up to rounding. So `key_scores` and `bounds_between`
return conditions for a correct result, and `agree_on_keys` and `agree_on_bounds` check a result against them.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.index_keys import read_index_keys
from pallas_kernels.index_topk.scoring import rows_and_seen
from pallas_kernels.sparse_attention import reference as sparse_reference
from pallas_kernels.workbench.attention_inputs import in_parts, some_queries
from pallas_kernels.workbench.tolerances import SCORE

_MOST_BYTES = 8 * 2**30
_REFERENCE_BYTES = 512 * 2**20
# Allowed error of a row's cumulative probability, from sums in float32.
_MASS_SLACK = 2e-6


def repeat_records(inputs: Mapping[str, Any], copies: int) -> tuple[dict, list[dict]]:
    """Returns shared and per-call arrays of `sparse_attention`; each call reads its own copy of the records.

    All copies are in one larger pool; a call's slots point to its copy.
    """
    arrays = {
        name: jnp.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)
    }
    records, slots = arrays["records"], arrays.pop("slots")
    copies = max(2, min(copies, _MOST_BYTES // records.nbytes))
    num_slots = records.shape[0] * records.shape[1]
    arrays["records"] = jnp.concatenate([records] * copies)
    real = slots < num_slots
    own = [
        {"slots": jnp.where(real, slots + copy * num_slots, copies * num_slots)}
        for copy in range(copies)
    ]
    return arrays, own


def repeat_logits(inputs: Mapping[str, Any], copies: int) -> tuple[dict, list[dict]]:
    """Returns shared and per-call arrays of `filter_bounds`; each call has its own copy of the logits."""
    arrays = {name: jnp.asarray(value) for name, value in inputs.items()}
    logits = arrays.pop("logits")
    return arrays, [{"logits": jnp.copy(logits)} for _ in range(copies)]


def repeat_choices(inputs: Mapping[str, Any], copies: int) -> tuple[dict, list[dict]]:
    """Returns shared and per-call arrays of `row_topk` or `group_rows`; each call has its own copy of all of them."""
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    # `asarray` might return one array for all of them.
    return {}, [{name: jnp.array(value) for name, value in arrays.items()} for _ in range(copies)]


def choices(op: str, inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the reference's results of an op that chooses, or of `gathered_matmul`."""
    reference = getattr(import_module(f"pallas_kernels.{op}.reference"), op)
    arrays = {name: jnp.asarray(v) for name, v in inputs.items() if isinstance(v, np.ndarray)}
    options = {name: value for name, value in inputs.items() if name not in arrays}
    parts = jax.tree.leaves(jax.jit(partial(reference, **options))(**arrays))
    return [np.asarray(part) for part in parts]


def sparse_answer(inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the reference's outputs of `sparse_attention` for the sampled queries."""
    options = {name: inputs[name] for name in ("scale", "value_dim")}
    attend = jax.jit(partial(sparse_reference.sparse_attention, **options))
    records = jnp.asarray(inputs["records"])

    def run(part: np.ndarray) -> tuple[Any, ...]:
        q, slots, counts = (jnp.asarray(inputs[name][part]) for name in ("q", "slots", "counts"))
        return attend(q, records, slots, counts)[:1]

    # Keys as bytes, decoded and as float32, and scores and weights of all heads.
    per_query = inputs["slots"].shape[1] * 4 * (3 * inputs["q"].shape[2] + 2 * inputs["q"].shape[1])
    return in_parts(some_queries(inputs), _REFERENCE_BYTES // max(1, per_query), run)


def key_scores(inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns for the sampled queries the float32 scores and slots of their row's keys, and how many keys they see."""
    names = ("q", "weights", "index_pages", "page_table", "seq_lens", "cu_q_lens")
    arrays = {name: jnp.asarray(inputs[name]) for name in names if name in inputs}
    q, pages, table = (arrays[name] for name in ("q", "index_pages", "page_table"))
    page_size = pages.shape[1]
    row, seen = rows_and_seen(len(q), arrays["seq_lens"], arrays.get("cu_q_lens"))
    offset = jnp.arange(page_size, dtype=jnp.int32)

    @jax.jit
    def run(part: jax.Array) -> tuple[jax.Array, ...]:
        ids = table[row[part]]
        keys = read_index_keys(pages[ids]).reshape(len(part), -1, q.shape[2])
        multiply = partial(jnp.einsum, precision="highest")
        products = multiply("thd,tcd->thc", q[part].astype(jnp.float32), keys)
        scores = multiply("th,thc->tc", arrays["weights"][part], jnp.maximum(products, 0.0))
        slots = (ids[:, :, None] * page_size + offset[None, None]).reshape(len(part), -1)
        return jnp.where(jnp.isnan(scores), jnp.inf, scores), slots, seen[part]

    per_query = table.shape[1] * page_size * 4 * (2 * q.shape[2] + q.shape[1])
    step = _REFERENCE_BYTES // max(1, per_query)
    return in_parts(some_queries(inputs), step, lambda part: run(jnp.asarray(part)))


def agree_on_keys(
    inputs: Mapping[str, Any], results: Sequence[Any], wanted: Sequence[np.ndarray]
) -> str | None:
    """Returns the first error in the slots and counts of `index_topk`, or `None` if they are correct.

    A correct selection has min(seen, topk) keys in ascending order of position, and up to rounding no selected key
    scores less than a key left out.
    """
    queries = some_queries(inputs)
    slots, counts = (np.asarray(result)[queries] for result in results)
    for chosen, count, scores, known, seen in zip(slots, counts, *wanted, strict=True):
        if count != min(seen, inputs["topk"]):
            return f"it chose {count} of {seen} keys, not {min(seen, inputs['topk'])}"
        order = np.argsort(known[:seen])
        there = np.searchsorted(known[:seen], chosen[:count], sorter=order)
        positions = order[np.minimum(there, max(0, seen - 1))]
        if not np.array_equal(known[positions], chosen[:count]):
            return "it chose slots that hold no key which the query sees"
        if (np.diff(positions) <= 0).any():
            return "its slots are not in ascending order of position"
        left = np.delete(scores[:seen], positions)
        if left.size and count:
            missed = left.max() - scores[positions].min()
            if not missed <= SCORE * np.abs(scores[:seen]).max():
                return f"a key that it left out scores {missed:.3g} more than one that it chose"
    return None


def bounds_between(inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns for each row two logits, computed in float64: a correct bound lies in (first, second].

    The first is the largest logit that must be filtered out, the second the smallest that must be kept.
    """
    columns = [inputs[name].tolist() for name in ("top_k", "top_p", "min_p", "temperature")]
    pairs = [_bounds_of(*row) for row in zip(inputs["logits"], *columns, strict=True)]
    return [np.array(side) for side in zip(*pairs, strict=True)]


def _bounds_of(
    row: np.ndarray, top_k: int, top_p: float, min_p: float, temperature: float
) -> tuple[float, float]:
    falling = np.sort(row.astype(np.float64))[::-1]
    best, kept = falling[0], len(falling)
    if 0 < top_k < kept:
        # Logits equal to the k-th largest are kept, too.
        kept = int(np.searchsorted(-falling, -falling[top_k - 1], side="right"))
    sides = []
    for slack in (_MASS_SLACK, -_MASS_SLACK):
        count = kept
        if top_p < 1.0:
            mass = np.cumsum(np.exp((falling[:kept] - best) / temperature))
            crossing = np.searchsorted(mass, (top_p + slack) * mass[-1], side="left")
            last = falling[min(int(crossing), kept - 1)]
            count = int(np.searchsorted(-falling, -last, side="right"))
        if min_p > 0.0:
            least = best + temperature * math.log(min_p) - slack
            count = min(count, int(np.searchsorted(-falling, -least, side="right")))
        sides.append(max(1, count))
    widest, narrowest = sides
    left_out = falling[widest] if widest < len(falling) else -np.inf
    return float(left_out), float(falling[narrowest - 1])


def agree_on_bounds(
    inputs: Mapping[str, Any], results: Sequence[Any], wanted: Sequence[np.ndarray]
) -> str | None:
    """Returns the first error in the bounds of `filter_bounds`, or `None` if they are correct."""
    [bounds], (left_out, smallest) = results, wanted
    got = np.asarray(bounds).astype(np.float64)
    # Logits of -inf are never sampled, so a bound of -inf filters them out as well.
    is_right = ((got > left_out) | (left_out == -np.inf)) & (got <= smallest)
    if is_right.all():
        return None
    row = int(np.flatnonzero(~is_right)[0])
    return f"the bound of row {row} is {got[row]}, outside of ({left_out[row]}, {smallest[row]}]"

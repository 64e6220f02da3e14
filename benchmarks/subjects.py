"""The ops as benchmarks see them: their cases, their calls over rotating inputs, and the right answer.

It does not time anything.
"""

import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels.page_write import reference as page_write_reference
from pallas_kernels.paged_attention import reference as attention_reference
from tests.tolerances import OUTPUT

OPS = ("paged_attention", "ragged_attention", "page_write")

_MOST_COPIES = 64
_MOST_BYTES = 8 * 2**30
_REFERENCE_BYTES = 512 * 2**20


class WrongResult(RuntimeError):
    """An implementation does not compute what the reference does, so its time means nothing."""


def load_cases(op: str) -> dict[str, Any]:
    """Returns the op's cases by name."""
    return {case.name: case for case in import_module(f"pallas_kernels.{op}.cases").CASES}


def implementations(op: str) -> list[str]:
    """Returns the names of the op's implementations: files that hold a function of the op's own name."""
    package = import_module(f"pallas_kernels.{op}")
    names = [file.name for file in pkgutil.iter_modules(package.__path__)]
    return [
        name
        for name in sorted({*names} - {"api", "reference", "cases"})
        if hasattr(import_module(f"{package.__name__}.{name}"), op)
    ]


@dataclass(frozen=True)
class Subject:
    """One op on one case.

    Attributes:
        inputs: the op's arguments by name, on the host.
        shared: the arrays that all calls use, on the device.
        own: for each call, the arrays that make it read other memory than the call before.
        expected: the right answer to the call on `inputs`.
    """

    op: str
    dtype: str
    inputs: Mapping[str, Any]
    shared: dict[str, Any]
    own: list[dict[str, Any]]
    expected: Any

    def call(self, implementation: str) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Returns the op as a function of shared and own arrays, which gives both the shared arrays and its result."""
        function = getattr(pallas_kernels, self.op)
        given = {*self.shared, *self.own[0]}
        options = {name: value for name, value in self.inputs.items() if name not in given}

        def run(shared: dict[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any], Any]:
            result = function(**shared, **own, **options, implementation=implementation)
            if self.op == "page_write":
                return {**shared, "pages": result}, None
            return shared, result

        return run

    def check(self, function: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        """Raises `WrongResult` unless one call of `function` gives the right answer."""
        shared, result = jax.jit(function)(self.shared, self.own[0])
        if self.op == "page_write":
            compare(shared["pages"], self.expected, exact=True)
        else:
            compare([result], [self.expected], tolerance=OUTPUT[self.dtype])


def compare(results: Any, wanted: Any, *, tolerance: float = 0.0, exact: bool = False) -> None:  # noqa: ANN401 - sequences of arrays
    """Raises `WrongResult` where results differ: NaN is always wrong, unless equal bits are asked for."""
    for result, right in zip(results, wanted, strict=True):
        got, want = np.asarray(result), np.asarray(right)
        if exact:
            if got.tobytes() != want.tobytes():
                raise WrongResult("its bits differ from the reference's")
            continue
        error = np.abs(got.astype(np.float32) - want) - tolerance * np.abs(want)
        if not bool((error <= tolerance).all()):
            raise WrongResult(
                f"it differs from the reference by {np.max(error):.3g}, NaN counts as wrong"
            )


def prepare(op: str, case: Any, dtype: str, rotation_bytes: int) -> Subject:  # noqa: ANN401 - each op has its own Case
    """Makes a case's inputs, enough further calls to cover `rotation_bytes`, and its right answer."""
    inputs = case.inputs(seed=0, dtype=dtype)
    copies = min(max(2, math.ceil(rotation_bytes / max(1, case.bytes_moved(dtype)))), _MOST_COPIES)
    if op == "page_write":
        shared, own = _shift_slots(inputs, copies)
        pages, values = (tuple(map(jnp.asarray, inputs[name])) for name in ("pages", "values"))
        expected = page_write_reference.page_write(pages, values, jnp.asarray(inputs["slots"]))
    else:
        shared, own = _repeat_pages(inputs, copies)
        expected = _attention(op, inputs)
    return Subject(op, dtype, inputs, shared, own, expected)


def _shift_slots(inputs: Mapping[str, Any], copies: int) -> tuple[dict, list[dict]]:
    """Each call writes to other slots of the same pools; padding slots stay out of range."""
    num_slots = int(np.prod(inputs["pages"][0].shape[:2]))
    slots = inputs["slots"]
    own = []
    for copy in range(copies):
        moved = (slots.astype(np.int64) + copy * (num_slots // copies)) % num_slots
        own.append({"slots": jnp.asarray(np.where(slots < num_slots, moved, slots), jnp.int32)})
    shared = {name: tuple(map(jnp.asarray, inputs[name])) for name in ("pages", "values")}
    return shared, own


def _repeat_pages(inputs: Mapping[str, Any], copies: int) -> tuple[dict, list[dict]]:
    """Each call reads its own copy of the pages, all of them in one larger pool, as a cache would hold them."""
    pool_bytes = inputs["k_pages"].nbytes + inputs["v_pages"].nbytes
    copies = max(2, min(copies, _MOST_BYTES // pool_bytes))
    arrays = {
        name: jnp.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)
    }
    table, num_pages = arrays.pop("page_table"), inputs["k_pages"].shape[0]
    for name in ("k_pages", "v_pages"):
        arrays[name] = jnp.tile(arrays[name], (copies, 1, 1, 1))
    return arrays, [{"page_table": table + jnp.int32(copy * num_pages)} for copy in range(copies)]


def _attention(op: str, inputs: Mapping[str, Any]) -> np.ndarray:
    """The reference's answer, computed a few queries at a time: it gathers all keys of each query."""
    q, page_table, seq_lens = (inputs[name] for name in ("q", "page_table", "seq_lens"))
    rows, visible = np.arange(len(seq_lens)), seq_lens
    if op == "ragged_attention":
        rows, visible = _rows_of_tokens(inputs["cu_q_lens"], seq_lens, len(q))
    k_pages, v_pages = jnp.asarray(inputs["k_pages"]), jnp.asarray(inputs["v_pages"])
    options = {name: inputs[name] for name in ("scale", "window", "soft_cap")}
    sinks = None if inputs["sinks"] is None else jnp.asarray(inputs["sinks"])
    attend = jax.jit(partial(attention_reference.paged_attention, **options))
    keys = page_table.shape[1] * k_pages.shape[1]
    step = max(1, _REFERENCE_BYTES // (keys * q.shape[1] * q.shape[2] * 4))
    parts = []
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        out, _ = attend(
            jnp.asarray(q[part]),
            k_pages,
            v_pages,
            jnp.asarray(page_table[rows[part]]),
            jnp.asarray(visible[part]),
            sinks=sinks,
        )
        parts.append(np.asarray(out))
    return np.concatenate(parts)


def _rows_of_tokens(
    cu_q_lens: np.ndarray, seq_lens: np.ndarray, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each packed token, its row and the keys that it sees; padding tokens see none of row 0's."""
    q_lens = np.diff(cu_q_lens)
    rows = np.repeat(np.arange(len(q_lens)), q_lens)
    visible = seq_lens[rows] - (cu_q_lens[rows + 1] - np.arange(len(rows)) - 1)
    padding = np.zeros(tokens - len(rows), np.int32)
    return np.append(rows, padding), np.append(visible, padding).astype(np.int32)

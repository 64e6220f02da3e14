"""The ops for benchmarks and tuning: cases, calls over rotating inputs, and the comparison with the reference.

`timing.py` has the measurements.
"""

import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import pallas_kernels
from pallas_kernels.rotary_write import reference as rotary_reference
from pallas_kernels.workbench import (
    attention_inputs,
    matmul_inputs,
    selection_inputs,
    state_inputs,
)
from pallas_kernels.workbench.timing import Chain
from pallas_kernels.workbench.tolerances import OUTPUT

_MOST_COPIES = 32
# Dtype -> absolute and relative distance of neighbouring 8-bit values. A value halfway between two may round to either.
_ONE_STEP = {"int8": (1.0, 0.0), "float8_e4m3fn": (2.0**-9, 2.0**-3)}


class WrongResult(RuntimeError):
    """An implementation's result differs from the reference's, so its time is not reported."""


def load_cases(op: str) -> dict[str, Any]:
    """Returns the op's cases by name."""
    return {case.name: case for case in import_module(f"pallas_kernels.{op}.cases").CASES}


def implementations(op: str) -> list[str]:
    """Returns the names of the op's implementations: the modules that define a function of the op's name."""
    package = import_module(f"pallas_kernels.{op}")
    names = [file.name for file in pkgutil.iter_modules(package.__path__)]
    return [
        name
        for name in sorted({*names} - {"api", "reference", "cases"})
        if hasattr(import_module(f"{package.__name__}.{name}"), op)
    ]


class Kind(NamedTuple):
    """The functions by which benchmarks call one op repeatedly and check it.

    Attributes:
        spread: (case inputs, number of copies) -> (arrays that all calls share, per-call arrays of each call).
        answer: inputs -> the reference's results as a list of arrays.
        pool: name of the argument that the op updates and returns, alone or as its last result; `None` if the op only
            reads.
        exact: whether results must equal the reference's bit for bit.
        agree: (inputs, results, reference) -> a description of the first error, or `None` if the results are right.
            Without `agree`, results must equal the reference's up to rounding.
    """

    spread: Callable[[Mapping[str, Any], int], tuple[dict[str, Any], list[dict[str, Any]]]]
    answer: Callable[[Mapping[str, Any]], list[np.ndarray]]
    pool: str | None = None
    exact: bool = False
    agree: Callable[[Mapping[str, Any], Sequence[Any], Sequence[np.ndarray]], str | None] | None = (
        None
    )

    @property
    def writes(self) -> bool:
        """Whether the op updates and returns a pool."""
        return self.pool is not None


@dataclass(frozen=True, eq=False)
class BenchInputs:
    """The inputs of one op on one case, for repeated calls, and the expected result.

    Attributes:
        op: the op's name.
        dtype: dtype of the inputs.
        inputs: the op's arguments by name, on the host.
        shared: arrays that all calls use, on the device.
        own: per call, the arrays that make it read other memory than the previous call.
        expected: the reference's results on `inputs`; for a pool, its values at the written slots.
    """

    op: str
    dtype: str
    inputs: Mapping[str, Any]
    shared: dict[str, Any]
    own: list[dict[str, Any]]
    expected: list[np.ndarray]

    def call(self, implementation: str | None) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Returns the op as a function (shared, own) -> (shared, results), with the updated pool in `shared`."""
        function = getattr(pallas_kernels, self.op)
        given = {*self.shared, *self.own[0]}
        options = {name: value for name, value in self.inputs.items() if name not in given}

        def run(shared: dict[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any], Any]:
            result = function(**shared, **own, **options, implementation=implementation)
            pool = KINDS[self.op].pool
            if pool is None:
                return shared, result if isinstance(result, tuple) else (result,)
            alone = pool == "pages" and not isinstance(result[-1], tuple)
            *others, written = (result,) if alone else result
            return {**shared, pool: written}, tuple(others)

        return run

    def check(self, function: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        """Raises `WrongResult` unless one call of `function` gives the expected result."""
        shared, results = jax.jit(function)(self.shared, self.own[0])
        pool = KINDS[self.op].pool
        written = () if pool is None else self._written(pool, shared[pool])
        self.compare([*results, *written])

    def _written(self, pool: str, after: Any) -> list[np.ndarray]:  # noqa: ANN401 - a pool or several
        """Returns the pool's values at the case's slots or states.

        Raises:
            WrongResult: the call changed another slot or state.
        """
        before = self.shared[pool]
        if pool == "states":
            values, is_changed = state_inputs.states_at(self.inputs, before, after)
        else:
            slots = self.own[0]["slots"]
            found = [_look_up(*pair, slots) for pair in zip(before, after, strict=True)]
            values = [np.asarray(value)[_real(self.inputs)] for value, _ in found]
            is_changed = any(bool(changed) for _, changed in found)
        if is_changed:
            raise WrongResult("it changed a slot or state that the call does not name")
        return values

    def chain(self, function: Callable[[Any, Any], tuple[Any, Any]]) -> Chain:
        """Returns all calls as one program, after comparing its results; raises `WrongResult` as `check` does."""
        # A launch donates its arrays, so the chain gets a copy.
        chain = Chain(function, jax.tree.map(jnp.copy, self.shared), self.own)
        if KINDS[self.op].writes:
            # A launch leaves the writes of every call in the pool, so one call is checked by itself.
            self.check(function)
        else:
            self.compare(chain.launch()[0])
        return chain

    def compare(self, results: Sequence[Any]) -> None:
        """Raises `WrongResult` unless `results` are right; of attention ops only the sampled queries are compared."""
        agree = KINDS[self.op].agree
        if agree is not None:
            problem = agree(self.inputs, results, self.expected)
            if problem is not None:
                raise WrongResult(problem)
            return
        if not KINDS[self.op].writes and "q" in self.inputs:
            results = [
                np.asarray(result)[attention_inputs.some_queries(self.inputs)] for result in results
            ]
        exact, tolerance = KINDS[self.op].exact, OUTPUT[self.dtype]
        compare(results, self.expected, tolerance=tolerance, exact=exact)


def compare(
    results: Any,  # noqa: ANN401 - a sequence of arrays
    wanted: Any,  # noqa: ANN401 - a sequence of arrays
    *,
    tolerance: float = 0.0,
    exact: bool = False,
) -> None:
    """Raises `WrongResult` if results differ by more than the tolerance, or in a bit if `exact`.

    NaN in a result is an error, except under `exact`, where the reference's NaN must be reproduced.
    """
    for result, right in zip(results, wanted, strict=True):
        got, want = np.asarray(result), np.asarray(right)
        if exact:
            if got.tobytes() != want.tobytes():
                raise WrongResult("its bits differ from the reference's")
            continue
        absolute, relative = _ONE_STEP.get(want.dtype.name, (tolerance, tolerance))
        got, want = got.astype(np.float32), want.astype(np.float32)
        error = np.abs(got - want) - relative * np.abs(want)
        if not bool((error <= absolute).all()):
            raise WrongResult(
                f"it differs from the reference by {np.max(error):.3g} (a NaN is an error, too)"
            )


def prepare(
    op: str,
    case: Any,  # noqa: ANN401 - each op has its own Case
    dtype: str,
    rotation_bytes: int,
) -> BenchInputs:
    """Makes a case's inputs, as many calls as it takes to read `rotation_bytes`, and the reference's results."""
    inputs = case.inputs(seed=0, dtype=dtype)
    copies = min(max(2, math.ceil(rotation_bytes / max(1, case.bytes_moved(dtype)))), _MOST_COPIES)
    shared, own = KINDS[op].spread(inputs, copies)
    return BenchInputs(op, dtype, inputs, shared, own, KINDS[op].answer(inputs))


def _shift_slots(inputs: Mapping[str, Any], copies: int) -> tuple[dict, list[dict]]:
    """Returns shared and per-call arrays; each call writes other slots of the same pools, padding stays padding."""
    num_slots = int(np.prod(inputs["pages"][0].shape[:2]))
    slots = inputs["slots"]
    own = []
    for copy in range(copies):
        moved = (slots.astype(np.int64) + copy * (num_slots // copies)) % num_slots
        own.append({"slots": jnp.asarray(np.where(slots < num_slots, moved, slots), jnp.int32)})
    arrays = {name: value for name, value in inputs.items() if name != "slots" and _is_array(value)}
    return jax.tree.map(jnp.asarray, arrays), own


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array | np.ndarray | tuple)


def _written(inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the values that `page_write` must leave at the slots of each pool."""
    pairs = zip(inputs["pages"], inputs["values"], strict=True)
    return [value[_real(inputs)].astype(pool.dtype) for pool, value in pairs]


def _rotated_and_written(inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the reference's rotated queries and written values.

    It runs on small pools with one slot per token, because the reference copies a whole pool for each token.
    """
    tokens = len(inputs["slots"])
    small = tuple(jnp.zeros((tokens, 1, *pool.shape[2:]), pool.dtype) for pool in inputs["pages"])
    others = {name: value for name, value in inputs.items() if name != "pages"}
    value_norm = others.pop("value_norm", False)
    order = jnp.arange(tokens, dtype=jnp.int32)
    # Excess precision between two roundings would give other, equally valid bits.
    rounding = {"xla_allow_excess_precision": False}
    reference = partial(rotary_reference.rotary_write, value_norm=value_norm)
    run = jax.jit(reference, compiler_options=rounding)
    queries, pools = run(small, **{**others, "slots": order})
    values = [np.asarray(pool)[:, 0] for pool in pools]
    return [np.asarray(queries), *(value[_real(inputs)] for value in values)]


def _real(inputs: Mapping[str, Any]) -> np.ndarray:
    """Returns for each token whether it is written; slots past the end are padding."""
    return inputs["slots"] < np.prod(inputs["pages"][0].shape[:2])


@jax.jit
def _look_up(before: Array, after: Array, slots: Array) -> tuple[Array, Array]:
    """Returns the pool's values at the slots, and whether any other slot has changed."""
    num_slots = before.shape[0] * before.shape[1]
    flat = after.reshape(num_slots, *after.shape[2:])
    changed = jnp.any((before != after).reshape(num_slots, -1), axis=1)
    changed = changed.at[slots].set(False, mode="drop")
    return flat.at[slots].get(mode="clip"), jnp.any(changed)


_ATTENTION = Kind(attention_inputs.repeat_pages, attention_inputs.answer)
KINDS = {
    "paged_attention": _ATTENTION,
    "ragged_attention": _ATTENTION,
    "latent_attention": Kind(attention_inputs.repeat_pages, attention_inputs.latent_answer),
    "index_topk": Kind(
        attention_inputs.repeat_pages,
        selection_inputs.key_scores,
        agree=selection_inputs.agree_on_keys,
    ),
    "sparse_attention": Kind(selection_inputs.repeat_records, selection_inputs.sparse_answer),
    "filter_bounds": Kind(
        selection_inputs.repeat_logits,
        selection_inputs.bounds_between,
        agree=selection_inputs.agree_on_bounds,
    ),
    "row_topk": Kind(
        selection_inputs.repeat_choices, partial(selection_inputs.choices, "row_topk"), exact=True
    ),
    "group_rows": Kind(
        selection_inputs.repeat_choices, partial(selection_inputs.choices, "group_rows"), exact=True
    ),
    "page_write": Kind(_shift_slots, _written, pool="pages", exact=True),
    "rotary_write": Kind(_shift_slots, _rotated_and_written, pool="pages"),
    "skinny_matmul": Kind(matmul_inputs.repeat_weights, matmul_inputs.answer),
    "gathered_matmul": Kind(
        matmul_inputs.repeat_choices, partial(selection_inputs.choices, "gathered_matmul")
    ),
} | {
    op: Kind(state_inputs.repeat_states, partial(state_inputs.answer, op), pool="states")
    for op in ("causal_conv", "ssd_scan", "ssd_update", "delta_scan", "delta_update")
}
OPS = tuple(KINDS)

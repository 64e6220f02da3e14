"""The contract of `filter_bounds`, signed by every implementation, and its Mosaic GPU kernel in the interpreter."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import filter_bounds
from pallas_kernels.filter_bounds import mosaic_gpu, reference, xla
from pallas_kernels.filter_bounds.cases import CASES, Case
from pallas_kernels.mosaic.ordered_floats import from_ordered, ordered
from tests.pallas_kernels.contract import bits, call, cases, compiled, implementations

every_implementation = implementations("mosaic_gpu", "xla")
SMALL = [case for case in CASES if case.ci]


def refusal(implementation, inputs):
    if implementation == "xla":
        return None
    return mosaic_gpu.why_not(jnp.asarray(inputs["logits"]))


def run(inputs, implementation):
    return np.asarray(call(filter_bounds, refusal, inputs, implementation))


def kept(row, k, p, share, temperature, slack):
    """Which logits the definitions keep, in float64; a probability may miss its bound by `slack`."""
    row = row.astype(np.float64)
    falling = np.sort(row)[::-1]
    allowed = row >= falling[k - 1] if 0 < k < len(row) else np.ones(len(row), bool)
    if p < 1:
        weights = np.where(allowed, np.exp((row - row.max()) / temperature), 0)
        order = np.argsort(-row, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        # Equal logits share the fate of the first of them.
        first = np.searchsorted(-row[order], -row, side="left")
        allowed &= (before[first] < (p + slack) * weights.sum()) | (row == row.max())
    if share > 0:
        allowed &= row >= row.max() + temperature * np.log(share) - slack
    return allowed


def assert_is_oracle(bounds, inputs):
    names = ("logits", "top_k", "top_p", "min_p", "temperature")
    rows = zip(*(inputs[name] for name in names), strict=True)
    for bound, (row, k, p, share, heat) in zip(bounds, rows, strict=True):
        found = row >= bound
        surely, perhaps = (kept(row, k, p, share, heat, slack) for slack in (-2e-6, 2e-6))
        assert (surely <= found).all()
        assert (found <= perhaps).all()


@cases(CASES)
@every_implementation
def test_it_keeps_what_the_definitions_keep(implementation, case):
    inputs = case.inputs(1)
    assert_is_oracle(run(inputs, implementation), inputs)


@cases(SMALL)
def test_the_reference_keeps_it_too(case):
    inputs = case.inputs(2)
    assert_is_oracle(np.asarray(compiled(reference.filter_bounds, inputs)), inputs)


@every_implementation
def test_rows_do_not_see_each_other(implementation):
    """Permuted rows give permuted bounds, bit by bit."""
    inputs = CASES[0].inputs(4)
    order = np.random.default_rng(0).permutation(CASES[0].rows)
    moved = {name: value[order] for name, value in inputs.items()}
    assert bits(run(inputs, implementation)[order]) == bits(run(moved, implementation))
    alone = {name: value[3:4] for name, value in inputs.items()}
    assert bits(run(inputs, implementation)[3:4]) == bits(run(alone, implementation))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "top_k", "top_p"),
    [
        ("normal", (50, 0), (0.5, 0.9)),  # the guess holds, and misses
        ("ties", (3, 700), (1.0, 0.95)),  # more equal logits than a list has room for
    ],
)
def test_interpreted_it_finds_what_the_sort_finds(kind, top_k, top_p, races):
    case = Case("interpreted", 2, 10244, top_k, top_p, kind=kind)
    inputs: dict[str, Any] = {k: jnp.asarray(v) for k, v in case.inputs(5).items()}
    found = jax.block_until_ready(mosaic_gpu.filter_bounds(**inputs, interpret=True))
    assert bits(found) == bits(xla.filter_bounds(**inputs))
    assert not races()


def test_integers_have_the_order_of_floats():
    x = np.array([-np.inf, -3e38, -1.5, -2e-38, -0.0, 0.0, 2e-38, 2.0, 3e38, np.inf], np.float32)
    image = np.asarray(ordered(jnp.asarray(x)))
    assert (np.sign(np.diff(image.astype(np.int64))) == np.sign(np.diff(x))).all()
    assert np.array_equal(from_ordered(jnp.asarray(image)), x)
    assert (np.asarray(ordered(jnp.array([np.nan, -np.nan]))) > image[-1]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": np.zeros(3, np.int32)}, r"top_k must have shape \[12\], got \[3\]"),
        ({"top_p": np.ones(12, np.float16)}, "top_p must be float32, got float16"),
        ({"logits": np.zeros((12, 9), np.int32)}, "logits must be float32, got int32"),
    ],
)
def test_wrong_arguments_are_refused(change, message, as_in_production):
    with pytest.raises(ValueError, match=message):
        filter_bounds(**{**CASES[0].inputs(), **change})


def test_the_kernel_says_which_vocabularies_it_takes():
    assert mosaic_gpu.refusal(jnp.zeros((1, 128256))) is None
    assert "multiple of 4 and at least 2048, got 131" in str(
        mosaic_gpu.refusal(jnp.zeros((1, 131)))
    )
    odd: dict[str, Any] = {k: jnp.asarray(v) for k, v in CASES[5].inputs().items()}
    with pytest.raises(ValueError, match="cannot take this: the vocabulary must be"):
        mosaic_gpu.filter_bounds(**odd)
    inputs = CASES[0].inputs()
    empty = {name: value[:0] for name, value in inputs.items()}
    assert partial(filter_bounds, **empty)().shape == (0,)

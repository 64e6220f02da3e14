"""The contract of `grouped_matmul`, signed by every implementation."""

import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import grouped_matmul
from pallas_kernels.dispatch import asking, fallbacks
from pallas_kernels.grouped_matmul import mosaic_gpu, reference, xla
from pallas_kernels.grouped_matmul.cases import CASES, Case, drawn_sizes
from tests.pallas_kernels.contract import bits, call, compared, compiled, implementations
from tests.pallas_kernels.few_bits import KINDS, drawn, exact
from tests.tolerances import assert_output

SMALL = {case.name: case for case in CASES if case.ci}
# Weights are drawn on the host: larger ones are left to benchmarks.
REAL = [case for case in CASES if not case.ci and math.prod(case.weight_shape) <= 2**26]
ANY = Case("", (24, 0, 0, 0, 0), 16, 8, group_axis=1)
ANY_RUN = [jax.jit(partial(run.grouped_matmul, group_axis=1)) for run in (reference, xla)]
every_implementation = implementations("xla", "mosaic_gpu")


def oracle(inputs):
    """The op in float64, in NumPy alone, a group at a time."""
    weight = np.moveaxis(np.asarray(inputs["weight"], np.float64), inputs["group_axis"], 0)
    x, start, parts = np.asarray(inputs["x"], np.float64), 0, []
    for matrix, size in zip(weight, inputs["group_sizes"], strict=True):
        parts.append(x[start : start + size] @ matrix.T)
        start += size
    return np.concatenate(parts)


def refusal(implementation, inputs):
    if implementation == "xla":
        return None
    options = {name: inputs[name] for name in ("group_axis", "result")}
    return mosaic_gpu.why_not(inputs["weight"], inputs["x"], **options)


@compared(list(SMALL.values()))
def test_it_equals_the_oracle(implementation, case, dtype):
    """Summed in float32 whatever the inputs are, and rounded to the dtype asked for."""
    inputs = case.inputs(1, dtype)
    result = call(grouped_matmul, refusal, inputs, implementation)
    assert result.shape == (case.rows, case.out)
    assert result.dtype == jnp.dtype(case.result or dtype)
    assert_output(result, oracle(inputs), dtype)


@pytest.mark.parametrize("case", SMALL.values(), ids=lambda case: case.name)
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    assert_output(compiled(reference.grouped_matmul, inputs), oracle(inputs), "float32")


@settings(deadline=None, max_examples=50)
@given(ends=st.lists(st.integers(0, 24), min_size=4, max_size=4).map(sorted))
def test_any_sizes_that_add_up_are_right(ends):
    """By the reference and by XLA, compiled once: sizes are no static fact."""
    inputs = ANY.inputs(6, "float32")
    sizes = np.diff([*ends, ANY.rows], prepend=0).astype(np.int32)
    wanted = oracle(inputs | {"group_sizes": sizes})
    for run in ANY_RUN:
        assert_output(run(inputs["weight"], inputs["x"], sizes), wanted, "float32")


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_axis", [0, 1])
def test_weights_in_few_bits_equal_the_same_weights_in_float64(implementation, kind, group_axis):
    """Groups with and without rows."""
    if implementation == "xla" and (
        kind != "int4 by 64, zeros" and (group_axis or kind != "mxfp4")
    ):
        pytest.skip("one way for all kinds, which the tests of skinny_matmul compare")
    case = Case("", (3, 0, 21, 1), 384, 88, group_axis)
    inputs = case.inputs(7)
    weight = drawn(kind, inputs["weight"].shape[:2], 384)
    result = call(grouped_matmul, refusal, inputs | {"weight": weight}, implementation)
    assert_output(result, oracle(inputs | {"weight": exact(weight)}), "bfloat16")


@pytest.mark.parametrize("run", [reference, xla], ids=["reference", "xla"])
def test_each_group_may_have_an_order_of_columns(run):
    """In float32, exact for hostile scales."""
    rng = np.random.default_rng(1)
    orders = np.stack([rng.permutation(384) for _ in range(3)]).astype(np.int32)
    weight = drawn("int4 by 128, zeros", (3, 24), 384, 3, hostile=True)
    inputs = Case("", (2, 0, 4), 384, 24).inputs(3, "float32")
    x = np.take_along_axis(inputs["x"], orders[[0, 0, 2, 2, 2, 2]], axis=1)
    wanted = oracle(inputs | {"weight": exact(weight), "x": x})
    most = oracle(inputs | {"weight": np.abs(exact(weight)), "x": np.abs(x)})
    op = grouped_matmul if run is xla else reference.grouped_matmul
    found = compiled(op, inputs | {"weight": replace(weight, order=orders)})
    assert np.all(np.abs(found - wanted) <= 1e-6 * most)


def test_products_with_weights_in_few_bits_share_their_memory():
    """A chain of 16 takes the temporary memory of a chain of 4: nothing is allocated before its product runs."""
    parts = drawn("int8 by row", (2, 256), 256)
    types = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), parts)

    def temporary(count):
        def run(x, sizes, weights):
            for weight in weights:
                x = x + jnp.tanh(xla.grouped_matmul(weight, x, sizes))
            return x

        x, sizes = (
            jax.ShapeDtypeStruct((512, 256), jnp.float32),
            jax.ShapeDtypeStruct((2,), jnp.int32),
        )
        program = jax.jit(run).lower(x, sizes, [types] * count)
        return program.compile().memory_analysis().temp_size_in_bytes

    result_bytes = 4 * 512 * 256
    assert temporary(4) > result_bytes
    assert temporary(16) < temporary(4) + result_bytes


def test_rows_of_no_group_are_zero():
    """With a weight in few bits, as with any other."""
    weight = drawn("int8 by row", (2, 24), 32)
    x = np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)
    sizes = np.array([3, 1], np.int32)
    found = compiled(xla.grouped_matmul, {"weight": weight, "x": x, "group_sizes": sizes})
    wanted = oracle({"weight": exact(weight), "x": x, "group_axis": 0, "group_sizes": [3, 1]})
    assert_output(found, np.concatenate((wanted, np.zeros((2, 24)))), "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mxfp4", "e4m3 by 128", "int4 by 128, zeros"])
@pytest.mark.parametrize("tokens", [1, 64, 700])
@pytest.mark.parametrize("group_axis", [0, 1])
def test_real_experts_in_few_bits_equal_float64_and_repeat_bit_for_bit(kind, tokens, group_axis):
    """With hostile scales, windows of 16 and 64 rows, and to float32's precision."""
    inner = 2880 if kind == "mxfp4" else 2048
    case = Case("", drawn_sizes(tokens, 16, 4), inner, 1472, group_axis)
    inputs = case.inputs(3) | {"result": "float32"}
    weight = drawn(kind, case.weight_shape[:2], inner, hostile=True)
    run = partial(call, grouped_matmul, refusal, inputs | {"weight": weight}, "mosaic_gpu")
    result, again = run(), run()
    exactly = exact(weight)
    wanted = oracle(inputs | {"weight": exactly})
    x = np.abs(inputs["x"].astype(np.float64))
    most = oracle(inputs | {"weight": np.abs(exactly), "x": x})
    assert np.all(np.abs(np.asarray(result, np.float64) - wanted) <= 3e-6 * most)
    assert bits(result) == bits(again)


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)
def test_real_shapes_equal_the_oracle_and_repeat_bit_for_bit(case):
    """The order of all sums is fixed."""
    inputs = case.inputs(3)
    run = partial(call, grouped_matmul, refusal, inputs, "mosaic_gpu")
    result, again = run(), run()
    assert_output(result, oracle(inputs), "bfloat16")
    assert bits(result) == bits(again)


@every_implementation
@pytest.mark.parametrize("sizes", [(3, 0, 21, 9), (3, 0, 201, 90)], ids=["few", "many"])
def test_rows_do_not_see_each_other(implementation, sizes):
    """The bits are equal beside NaN and infinity, in another order within a group, and beside other rows."""
    case = Case("", sizes, 128, 128)
    inputs = case.inputs(4)
    run = partial(call, grouped_matmul, refusal, implementation=implementation)
    first = bits(run(inputs))
    poisoned = inputs["x"].copy()
    poisoned[1::2] = np.where(np.arange(case.inner) % 2, np.nan, np.inf)
    assert bits(run(inputs | {"x": poisoned}))[::2] == first[::2]
    ends = np.cumsum(sizes)
    order = np.concatenate(
        [np.arange(end)[::-1][:size] for size, end in zip(sizes, ends, strict=True)]
    )
    assert bits(run(inputs | {"x": inputs["x"][order]})) == [first[row] for row in order]
    # Most rows of the third group go to the last one; those that stay are what they were.
    moved = sizes[2] - 1
    sizes = np.array([sizes[0], 0, 1, sizes[3] + moved], np.int32)
    others = bits(run(inputs | {"group_sizes": sizes}))
    kept = [*range(4), *range(4 + moved, case.rows)]
    assert [others[row] for row in kept] == [first[row] for row in kept]


def test_the_kernel_runs_unasked_where_it_can(monkeypatch):
    """A fallback to XLA is counted."""
    inputs = SMALL["ragged"].inputs(1)
    with asking() as questions:
        compiled(lambda **given: grouped_matmul(**given), inputs)
    (question,) = questions
    assert list(question.refusals) == ["mosaic_gpu", "xla"]
    assert question.refusals["xla"] is None
    before = sum(fallbacks().values())
    monkeypatch.setattr(mosaic_gpu, "why_not", lambda *_, **__: "is not asked")
    compiled(lambda **given: grouped_matmul(**given), inputs)
    assert sum(fallbacks().values()) == before + 1
    monkeypatch.setattr(mosaic_gpu, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(mosaic_gpu, "grouped_matmul", lambda _, x, *__, **___: x[:, :3])
    assert compiled(lambda **given: grouped_matmul(**given), inputs).shape[1] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((29, 64), np.float32)}, "x must be bfloat16 or float16, got float32"),
        ({"result": "float64"}, "the result must be bfloat16, float16 or float32, got float64"),
        ({"inner": 60}, "the inner size must be a multiple of 64, got 60"),
        ({"out": 60}, "the weight must have a multiple of 8 rows, at least 64, got 60"),
        ({"rows": 0}, "there must be rows and groups, got 0 rows and 6 groups"),
    ],
)
def test_the_kernel_says_what_it_cannot_take(change, message):
    sizes = {"rows": 29, "inner": 64, "out": 64} | change
    weight = jnp.zeros((6, sizes["out"], sizes["inner"]), jnp.bfloat16)
    x = change.get("x", jnp.zeros((sizes["rows"], sizes["inner"]), jnp.bfloat16))
    with pytest.raises(ValueError, match=re.escape(message)):
        mosaic_gpu.grouped_matmul(
            weight.astype(x.dtype),
            jnp.asarray(x),
            jnp.zeros(6, jnp.int32),
            result=change.get("result"),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((29, 3), np.float32)}, "weight must have shape [any, any, 3]"),
        ({"group_axis": 2}, "group_axis must be 0 or 1"),
        ({"group_axis": 1}, "group_sizes must have shape [128], got [6]"),
        ({"group_sizes": np.zeros(6, np.int64)}, "group_sizes must be int32, got int64"),
        ({"group_sizes": np.zeros(5, np.int32)}, "group_sizes must have shape [6], got [5]"),
        ({"group_sizes": np.zeros(6, np.int32)}, "must add up to the 29 rows of x, got 0"),
        ({"group_sizes": np.array([30, 0, 0, 0, 0, -1], np.int32)}, "holds a negative number"),
        ({"x": np.zeros((29, 128), np.float16)}, "must share one floating dtype"),
        ({"x": np.zeros((29, 128), np.int32)}, "must share one floating dtype"),
    ],
)
def test_wrong_arguments_are_refused(change, message, as_in_production):
    with pytest.raises(ValueError, match=re.escape(message)):
        grouped_matmul(**SMALL["ragged"].inputs(1, "float32") | change)

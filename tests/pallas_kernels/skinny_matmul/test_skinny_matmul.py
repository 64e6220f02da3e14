"""The contract of `skinny_matmul`, signed by every implementation."""

import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import skinny_matmul
from pallas_kernels.dispatch import asking, fallbacks
from pallas_kernels.fixed_order import fixed_order
from pallas_kernels.formats import few_bits_product
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.skinny_matmul import mosaic_gpu, reference
from pallas_kernels.skinny_matmul.arguments import MatmulArrays, MatmulOptions
from pallas_kernels.skinny_matmul.cases import CASES
from pallas_kernels.skinny_matmul.mosaic_geometry import MOST_ROWS
from tests.pallas_kernels.contract import (
    bits,
    by_name,
    call,
    compared,
    compiled,
    device,
    equations,
    implementations,
    refusals,
)
from tests.pallas_kernels.few_bits import KINDS, drawn, exact, rounded, rounded_rows
from tests.tolerances import assert_output

SMALL = {case.name: case for case in CASES if case.ci}
REAL = [case for case in CASES if not case.ci]
every_implementation = implementations("xla", "mosaic_gpu")


def oracle(inputs):
    """The op in float64, in NumPy alone."""
    wide = {
        name: None if inputs.get(name) is None else np.asarray(inputs[name], np.float64)
        for name in ("weight", "x", "bias", "residual")
    }
    total = wide["x"] @ wide["weight"].T
    total = total if wide["bias"] is None else total + wide["bias"]
    gates, *ups = np.split(total, 2, axis=1) if inputs["gated"] else [total]
    gates = gates * inputs["gate_multiplier"]
    erf = np.vectorize(math.erf, otypes=[np.float64])
    functions = {
        None: lambda x: x,
        "silu": lambda x: x / (1 + np.exp(-x)),
        "gelu": lambda x: x * (1 + erf(x / 2**0.5)) / 2,
        "gelu_tanh": lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
        "relu2": lambda x: np.maximum(x, 0) ** 2,
    }
    total = functions[inputs["activation"]](gates)
    for up in ups:
        total = total * up
    return total if wide["residual"] is None else total + wide["residual"]


def in_few_bits(case, kind, seed=7, *, hostile=False):
    """A case's inputs with a weight in few bits, and the same with that weight in float64."""
    inputs = case.inputs(seed)
    weight = drawn(kind, inputs["weight"].shape[:1], case.inner, seed, hostile)
    return inputs | {"weight": weight}, inputs | {"weight": exact(weight)}


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_weights_in_few_bits_equal_the_same_weights_in_float64(implementation, kind, rows):
    """With gates and everything at the end, and equal bits for permuted rows."""
    if implementation == "xla" and (rows != 16 or kind not in ("e4m3 by row", "int4 by 32")):
        pytest.skip("XLA has one way for all numbers of rows, and one for all with several scales")
    case = type(CASES[0])("", rows, 768, 256, True, "silu", 1.0, True, True)
    inputs, wide = in_few_bits(case, kind)
    result = call(skinny_matmul, refusal, inputs, implementation)
    assert_output(result, oracle(wide), "bfloat16")
    order = np.random.default_rng(0).permutation(rows)
    moved = {name: inputs[name][order] for name in ("x", "residual")}
    permuted = call(skinny_matmul, refusal, inputs | moved, implementation)
    assert bits(permuted) == [bits(result)[row] for row in order]


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_scales_and_any_order_of_columns_are_exact_in_float32(kind):
    """Scales of 0, tiny, huge and powers of two, zero points of 0 and 15; a few rows are widened at a time."""
    weight = drawn(kind, (88,), 384, 3, hostile=True)
    order = np.random.default_rng(1).permutation(384).astype(np.int32)
    x = np.random.default_rng(2).normal(size=(3, 384)).astype(np.float32)
    wanted = x[:, order].astype(np.float64) @ exact(weight).T
    most = np.abs(x[:, order]) @ np.abs(exact(weight)).T
    weight = replace(weight, order=order)
    found = compiled(skinny_matmul, {"weight": weight, "x": x, "implementation": "xla"})
    assert np.all(np.abs(found - wanted) <= 1e-6 * most)
    found = compiled(reference.skinny_matmul, {"weight": weight, "x": x})
    assert np.all(np.abs(found - wanted) <= 1e-6 * most)


def test_a_weight_in_few_bits_is_widened_a_few_rows_at_a_time():
    """Also where the rows are no multiple of those; no array of the whole weight's size."""
    weight = jax.tree.map(jnp.asarray, drawn("int4 by 128, zeros", (88,), 384))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 384)), jnp.float32)
    tiled = jax.jit(partial(few_bits_product.product, most_widened=20 * 384))
    assert_output(tiled(weight, x), np.asarray(x, np.float64) @ exact(weight).T, "float32")
    shapes = [
        variable.aval.shape
        for equation in equations(jax.make_jaxpr(tiled)(weight, x).jaxpr)
        for variable in equation.outvars
    ]
    assert max(math.prod(shape) for shape in shapes) <= 20 * 384


@pytest.mark.parametrize(
    ("kind", "rows", "is_fixed", "is_whole"),
    [
        ("e4m3 by 128", 512, False, True),
        ("e4m3 by 128", 512, True, False),
        ("e4m3 by 128", 511, False, False),
        ("e4m3 by row", 4096, False, False),
        ("int4 by 128, zeros", 4096, False, True),
        ("mxfp4", 4095, False, False),
    ],
)
def test_a_weight_is_widened_whole_for_many_rows(kind, rows, is_fixed, is_whole, monkeypatch):
    """If groups of columns have scales, and numbers of rows may differ in their bits.

    The library's product is then no fallback from the kernel.
    """
    monkeypatch.setattr(few_bits_product, "MOST_WIDENED", 16 * 256)
    monkeypatch.setattr(mosaic_gpu, "why_not", mosaic_gpu.refusal)
    weight = jax.tree.map(jnp.asarray, drawn(kind, (64,), 256))
    x = jnp.zeros((rows, 256), jnp.bfloat16)
    with asking() as questions, fixed_order(is_fixed):
        jaxpr = jax.make_jaxpr(skinny_matmul)(weight, x).jaxpr
    assert ("while" in {each.primitive.name for each in equations(jaxpr)}) == (not is_whole)
    assert list(questions[0].refusals) == (
        ["xla", "mosaic_gpu"] if is_whole else ["mosaic_gpu", "xla"]
    )


def test_a_weight_of_more_than_512_mib_is_not_widened_whole():
    def weight(rows):
        codes = jax.ShapeDtypeStruct((rows, 2**14), jnp.float8_e4m3fn)
        scales = jax.ShapeDtypeStruct((rows, 2**7), jnp.float32)
        return FewBits(codes, scales, None, None, "float8_e4m3fn")

    x = jnp.zeros((512, 2**14), jnp.bfloat16)
    assert few_bits_product.widens_whole(weight(2**14), x)
    assert not few_bits_product.widens_whole(weight(2**14 + 1), x)


@pytest.mark.parametrize("kind", ["e4m3 by 128", "int4 by 128, zeros"])
def test_a_weight_that_is_widened_whole_is_exact_in_float32(kind, monkeypatch):
    """With hostile scales; in bfloat16 with those of a model, and everything at the end."""
    monkeypatch.setattr(few_bits_product, "_FEWEST_ROWS", {8: 16, 4: 16})
    weight = drawn(kind, (88,), 384, 3, hostile=True)
    x = np.random.default_rng(2).normal(size=(16, 384)).astype(np.float32)
    found = compiled(skinny_matmul, {"weight": weight, "x": x, "implementation": "xla"})
    most = np.abs(x) @ np.abs(exact(weight)).T
    assert np.all(np.abs(found - x.astype(np.float64) @ exact(weight).T) <= 1e-6 * most)
    case = type(CASES[0])("", 16, 768, 256, True, "silu", 1.0, True, True)
    inputs, wide = in_few_bits(case, kind)
    result = compiled(skinny_matmul, inputs | {"implementation": "xla"})
    assert_output(result, oracle(wide), "bfloat16")


@pytest.mark.parametrize("kind", ["int8 by row", "int8 by 32"])
def test_products_with_weights_in_few_bits_share_their_memory(kind, monkeypatch):
    """A chain of 16 takes the temporary memory of a chain of 4: nothing is allocated before its product runs."""
    monkeypatch.setattr(few_bits_product, "MOST_WIDENED", 128 * 512)
    monkeypatch.setattr(few_bits_product, "_FEWEST_ROWS", {8: 256})
    parts = drawn(kind, (512,), 512)
    types = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), parts)

    def temporary(count):
        def run(x, weights):
            for weight in weights:
                x = x + jnp.tanh(few_bits_product.product(weight, x))
            return x

        x = jax.ShapeDtypeStruct((256, 512), jnp.float32)
        program = jax.jit(run).lower(x, [types] * count).compile()
        return program.memory_analysis().temp_size_in_bytes

    result_bytes = 4 * 256 * 512
    assert temporary(4) > result_bytes
    assert temporary(16) < temporary(4) + result_bytes


refusal = refusals(mosaic_gpu=by_name(mosaic_gpu.why_not, MatmulArrays, MatmulOptions))


@compared(list(SMALL.values()))
def test_it_equals_the_oracle(implementation, case, dtype):
    """Summed in float32 whatever the inputs are, and rounded to the dtype asked for."""
    inputs = case.inputs(1, dtype)
    result = call(skinny_matmul, refusal, inputs, implementation)
    assert result.shape == (case.rows, case.out)
    assert result.dtype == jnp.dtype(case.result or dtype)
    assert_output(result, oracle(inputs), dtype)


@pytest.mark.parametrize("case", SMALL.values(), ids=lambda case: case.name)
def test_the_reference_equals_the_oracle(case):
    inputs = case.inputs(2, "float32")
    assert_output(compiled(reference.skinny_matmul, inputs), oracle(inputs), "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)
def test_real_shapes_equal_the_reference_and_repeat_bit_for_bit(case):
    """The order of all sums is fixed."""
    inputs = device(case.inputs(3))
    run = partial(call, skinny_matmul, refusal, inputs)
    result, again = run("mosaic_gpu"), run("mosaic_gpu")
    wanted = compiled(reference.skinny_matmul, inputs | {"result": "float32"})
    assert_output(result, np.asarray(wanted, np.float64), "bfloat16")
    assert bits(result) == bits(again)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
def test_real_shapes_in_few_bits_equal_float64_and_repeat_bit_for_bit(kind, rows):
    """With hostile scales, and to float32's precision: widening is exact, and many rows round a number once.

    A sum of many rows is one accumulator, in which each of 512 wgmma instructions may lose half a last place.
    """
    weight = drawn(kind, (4096,), 8192, hostile=True)
    x = np.random.default_rng(1).normal(size=(rows, 8192)).astype(jnp.bfloat16)
    inputs = {"weight": weight, "x": x, "result": "float32"}
    run = partial(call, skinny_matmul, refusal, inputs, "mosaic_gpu")
    result, again = run(), run()
    wide, weights = x.astype(np.float64), exact(weight) if rows <= MOST_ROWS else rounded(weight)
    assert worst(result, wide, weights) <= (3e-6 if rows <= MOST_ROWS else 8192 / 16 * 2**-24)
    assert bits(result) == bits(again)


def worst(result, x, weights):
    """Returns the largest error of a product relative to the sum of its magnitudes."""
    error = np.abs(np.asarray(result, np.float64) - x @ weights.T)
    return np.max(error / np.maximum(np.abs(x) @ np.abs(weights).T, 1e-30))


def _rounding(rows, inner=256, dtype=jnp.bfloat16):
    """Returns the arguments of a product whose weight asks for rounded rows; the rows differ in magnitude."""
    x = (
        np.random.default_rng(1).normal(size=(rows, inner))
        * np.exp2(np.arange(rows) % 9 - 4)[:, None]
    )
    weight = replace(drawn("e4m3 by row", (128,), inner), rounds_rows=True)
    return {"weight": weight, "x": x.astype(dtype), "result": "float32"}


def test_many_rows_are_rounded_to_8_bits_where_the_weight_asks_for_it():
    """And neither few rows, nor of odd widths, nor rows of float32, nor any under the fixed order of sums."""
    given = _rounding(70)
    odd = _rounding(70, 192)
    assert worst(skinny_matmul(**odd), odd["x"].astype(np.float64), exact(odd["weight"])) <= 1e-6
    x, weights = given["x"], exact(given["weight"])
    assert worst(skinny_matmul(**given), rounded_rows(x), weights) <= 1e-6
    for exactly in (given | {"x": x[:64]}, given | {"x": x.astype(np.float32)}):
        found = skinny_matmul(**exactly)
        assert worst(found, exactly["x"].astype(np.float64), weights) <= 1e-6
    with fixed_order():
        assert worst(skinny_matmul(**given), x.astype(np.float64), weights) <= 1e-6


def test_a_row_that_is_not_finite_is_rounded_to_nan_alone():
    given = _rounding(70)
    given["x"][3, 5] = np.inf
    found = np.asarray(skinny_matmul(**given))
    assert np.isnan(found[3]).all()
    assert np.isfinite(np.delete(found, 3, axis=0)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inner"), [(65, 4096), (300, 14336), (1000, 4096)])
def test_on_a_gpu_rounded_rows_lose_what_the_tensor_cores_lose(rows, inner):
    """They keep 14 bits of a sum of 8-bit products; no library is said to keep more."""
    given = _rounding(rows, inner)
    run = partial(call, skinny_matmul, refusal, given, "mosaic_gpu")
    result, again = run(), run()
    assert worst(result, rounded_rows(given["x"]), exact(given["weight"])) <= 2**-11
    assert bits(result) == bits(again)


@pytest.mark.gpu
def test_on_a_gpu_rounded_rows_of_a_gated_weight_equal_the_reference():
    inputs = type(CASES[0])("", 300, 4096, 2048, True, "silu", 1.0, True, True).inputs(5)
    weight = replace(drawn("e4m3 by row", (4096,), 4096), rounds_rows=True)
    result = call(skinny_matmul, refusal, inputs | {"weight": weight}, "mosaic_gpu")
    x = rounded_rows(inputs["x"])
    assert_output(result, oracle(inputs | {"weight": exact(weight), "x": x}), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["8b-down-b64", "8b-gate-up-b64", "8b-qkv-b64"])
@pytest.mark.parametrize("rows", [33, 40, 57])
def test_many_rows_equal_the_reference_where_they_fill_no_window(name, rows):
    """Under clusters, passes and neither: the rows, what a norm gets of them, and equal bits for permuted ones."""
    case = next(replace(case, rows=rows) for case in REAL if case.name == name)
    inputs = case.inputs(8)
    norm = np.linspace(0.5, 2, case.out).astype(inputs["x"].dtype)
    run = partial(call, skinny_matmul, refusal, implementation="mosaic_gpu")
    result, weighed, squares = run(inputs | {"next_norm": norm[None]})
    wanted = compiled(reference.skinny_matmul, inputs | {"result": "float32"})
    assert_output(result, np.asarray(wanted, np.float64), "bfloat16")
    wide = np.asarray(result, np.float64)
    assert_output(weighed, wide * np.asarray(norm, np.float64), "bfloat16")
    np.testing.assert_allclose(np.sum(squares, axis=0), np.sum(wide**2, axis=1), rtol=2e-3)
    order = np.random.default_rng(0).permutation(rows)
    moved = {key: inputs[key][order] for key in ("x", "residual") if inputs[key] is not None}
    permuted = run(inputs | moved)
    assert bits(permuted) == [bits(result)[row] for row in order]


@every_implementation
@pytest.mark.parametrize("rows", [5, 16, 40])
def test_rows_do_not_see_each_other(implementation, rows):
    """Permuted rows have the same bits, also beside NaN and infinity."""
    inputs = CASES[1].inputs(4) if rows == 5 else _rows(rows)
    order = np.random.default_rng(0).permutation(rows)
    first = bits(call(skinny_matmul, refusal, inputs, implementation))
    moved = {name: inputs[name][order] for name in ("x", "residual")}
    permuted = bits(call(skinny_matmul, refusal, inputs | moved, implementation))
    assert permuted == [first[row] for row in order]
    poisoned = inputs["x"].copy()
    poisoned[1::2] = np.where(np.arange(poisoned.shape[1]) % 2, np.nan, np.inf)
    others = bits(call(skinny_matmul, refusal, inputs | {"x": poisoned}, implementation))
    assert others[::2] == first[::2]


def _rows(rows, dtype="bfloat16"):
    case = SMALL["all-at-the-end"]
    return type(case)("", rows, 1024, 512, True, "silu", 1.0, True, True).inputs(5, dtype)


def test_rows_that_are_many_are_left_to_xla_without_a_fallback():
    """The op itself makes this choice, so a model of odd sizes keeps its other kernels."""
    before = sum(fallbacks().values())
    inputs = SMALL["more-rows"].inputs(1)
    compiled(skinny_matmul, inputs)
    assert sum(fallbacks().values()) == before
    with asking() as questions:
        compiled(lambda **given: skinny_matmul(**given), inputs)
    (question,) = questions
    assert list(question.refusals) == ["xla", "mosaic_gpu"]
    assert question.refusals["xla"] is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("more-rows", "at most 64 rows, got 65"),
        ("odd", "inner size must be a multiple of 64, got 60"),
        ("erf", "activation must be one of silu, gelu_tanh, relu2, got 'gelu'"),
    ],
)
def test_the_kernel_says_what_it_cannot_take(name, message):
    inputs = device(SMALL[name].inputs(1))
    with pytest.raises(ValueError, match=re.escape(message)):
        by_name(mosaic_gpu.skinny_matmul, MatmulArrays, MatmulOptions)(**inputs)


def _few(**change):
    """Returns a weight in few bits for the case of wrong arguments, with some parts of it replaced."""
    return replace(drawn("int4 by 128", (128,), 256), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 3), np.float32)}, "weight must have shape [any, 3], got [128, 256]"),
        ({"bias": np.zeros(7, np.float32)}, "bias must have shape [128], got [7]"),
        ({"residual": np.zeros((2, 128), np.float32)}, "residual must have shape [1, 128]"),
        ({"activation": "tanh"}, "activation must be one of silu, gelu, gelu_tanh, relu2"),
        ({"gated": True}, "residual must have shape [1, 64]"),
        ({"x": np.zeros((1, 256), np.float16)}, "weight and x must share one dtype"),
        ({"weight": np.zeros((128, 256), np.int8)}, "share one dtype, got int8 and float32"),
        ({"weight": _few(code="int3")}, "weight.code must be one of float8_e4m3fn, int8, int4"),
        ({"weight": _few(codes=np.zeros((128, 256), np.int8))}, "of int4 must be uint8, got int8"),
        ({"weight": _few(scales=np.ones((128, 3), np.float32))}, "got 3 for 256 columns"),
        ({"weight": _few(scales=np.ones((64, 2), np.float32))}, "must have shape [128, 2]"),
        ({"weight": _few(zeros=np.ones((128, 2), np.int8))}, "zeros must be uint8"),
        ({"weight": _few(zeros=np.ones((128, 4), np.uint8))}, "must have shape [128, 2]"),
        ({"weight": _few(rounds_rows=True)}, "rounds_rows needs codes of float8_e4m3fn"),
        ({"weight": _few(order=np.arange(128, dtype=np.int32))}, "int32 with 256 columns"),
        ({"x": np.zeros((1, 256), np.int32)}, "x must have a floating dtype, got int32"),
    ],
)
def test_wrong_arguments_are_refused(change, message, as_in_production):
    with pytest.raises(ValueError, match=re.escape(message)):
        skinny_matmul(**SMALL["one-row"].inputs(1, "float32") | change)


def test_an_odd_gated_weight_is_refused(as_in_production):
    with pytest.raises(ValueError, match="two rows for each column, got 65"):
        skinny_matmul(jnp.zeros((65, 64)), jnp.zeros((1, 64)), gated=True)


@every_implementation
@pytest.mark.parametrize(("rows", "dtype"), [(1, "float32"), (9, "bfloat16"), (40, "float32")])
def test_a_norm_between_two_products_equals_one_of_its_own(implementation, rows, dtype):
    """The sums are divided by the root mean square that the rows were to be divided by."""
    first, second = _rows(rows), type(CASES[0])("", rows, 512, 256).inputs(6)
    norm = np.linspace(0.5, 2, 512).astype(jnp.dtype(dtype))
    given = first | {"next_norm": np.stack([norm * 0, norm]), "norm_row": 1}
    run = partial(call, skinny_matmul, refusal, implementation=implementation)
    result, weighed, squares = run(given)
    assert_output(result, oracle(first), "bfloat16")
    wide = np.asarray(result, np.float64)
    assert_output(weighed, wide * np.asarray(norm, np.float64), "bfloat16")
    # A compiler may take squares of what was not rounded yet.
    assert_output(np.mean(squares, axis=0) * len(squares), np.sum(wide**2, axis=1), "bfloat16")
    last = run(second | {"x": np.asarray(weighed), "squares": squares, "norm_eps": 1e-5})
    unit = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-5)
    wanted = oracle(second | {"x": unit * np.asarray(norm, np.float64)})
    assert_output(last, wanted, "bfloat16")


def test_no_rows_have_no_squares():
    weight, norms = jnp.ones((64, 32)), jnp.ones((1, 64))
    for implementation in (None, "xla"):
        found = skinny_matmul(
            weight, jnp.zeros((0, 32)), next_norm=norms, implementation=implementation
        )
        assert [part.shape for part in found] == [(0, 64), (0, 64), (1, 0)]

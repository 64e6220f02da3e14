"""`gathered_matmul`: each row times the matrices that it chooses, of every form; its kernel's code in NumPy too."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import gathered_matmul
from pallas_kernels.dispatch import Unsupported, fallbacks
from pallas_kernels.formats.few_bits import CODES, FewBits
from pallas_kernels.gathered_matmul import geometry as sizes
from pallas_kernels.gathered_matmul import mosaic_four_bits, mosaic_gpu
from pallas_kernels.gathered_matmul.cases import CASES
from pallas_kernels.gathered_matmul.epilogue import SUMS, Epilogue
from tests.pallas_kernels.contract import cases, implementations
from tests.pallas_kernels.few_bits import KINDS, ODD_KINDS, drawn, exact
from tests.pallas_kernels.mosaic.numpy_threads import NumpyThreads, Race, without_barrier

# (rows, choices, groups, columns of the result, axis of the groups)
SHAPES = ((2, 3, 5, 37, 0), (4, 1, 3, 8, 1))


def by_hand(weight, x, chosen, axis, weights=None):
    """Returns the results in float64; x has a row for each row of choices, or for each choice."""
    wide = exact(weight) if isinstance(weight, FewBits) else weight.astype(np.float64)
    matrices, rows = np.moveaxis(wide, axis, 0)[chosen], len(chosen)
    each = x.astype(np.float64).reshape(rows, -1, x.shape[1]) if rows else x[:, None]
    sums = np.einsum("rci,rcoi->rco", np.broadcast_to(each, (*chosen.shape, x.shape[1])), matrices)
    return sums if weights is None else np.einsum("rco,rc->ro", sums, weights)


def made(kind, inner, shape, dtype="bfloat16", seed=0):
    """Returns a weight of a kind, or of x's dtype for `None`, with x and choices."""
    rows, count, groups, out, axis = shape
    rng = np.random.default_rng(seed)
    lead = (groups, out) if axis == 0 else (out, groups)
    if kind is None:
        weight = (rng.normal(size=(*lead, inner)) * inner**-0.5).astype(np.dtype(dtype))
    else:
        weight = drawn(kind, lead, inner, seed=seed, hostile=True)
    x = rng.normal(size=(rows, inner)).astype(np.dtype(dtype))
    chosen = rng.integers(0, groups, (rows, count)).astype(np.int32)
    return weight, x, chosen


def assert_near(got, wanted, tolerance, dtype=jnp.float32):
    assert got.dtype == dtype
    error = np.abs(np.asarray(got, np.float64) - wanted)
    assert (error <= tolerance * (np.abs(wanted).max() + 1e-30)).all()


@implementations("xla", "mosaic_gpu")
@cases(CASES)
def test_each_row_meets_the_matrices_that_it_chooses(implementation, case):
    inputs = case.inputs()
    given = {name: inputs[name] for name in ("weight", "x", "chosen", "group_axis")}
    if implementation == "mosaic_gpu" and mosaic_gpu.refusal(**given) is not None:
        pytest.skip("the kernel does not take these sizes")
    got = gathered_matmul(**inputs, implementation=implementation)
    wanted = by_hand(*given.values(), inputs["weights"])
    assert_near(got, wanted, 1e-5) if case.rows else np.testing.assert_array_equal(got, wanted)


@implementations("xla", "mosaic_gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_few_bits_are_those_of_their_format(implementation, kind):
    """XLA rounds them to x's dtype."""
    for shape in SHAPES:
        weight, x, chosen = made(kind, 256, shape)
        got = gathered_matmul(
            weight, x, chosen, group_axis=shape[-1], implementation=implementation
        )
        tolerance = 1e-5 if implementation == "mosaic_gpu" else 0.01
        assert_near(got, by_hand(weight, x, chosen, shape[-1]), tolerance)


@implementations("xla", "mosaic_gpu")
@pytest.mark.parametrize("orders", [1, 5])
def test_columns_in_an_order_of_their_own_meet_those_of_x(implementation, orders):
    weight, x, chosen = made("int4 by 128", 256, SHAPES[0])
    draw = np.random.default_rng(1)
    order = np.stack([draw.permutation(256) for _ in range(orders)]).astype(np.int32)
    each = np.broadcast_to(order, (5, 256))
    wanted = np.stack(
        [
            [by_hand(weight, row[None, each[group]], np.array([[group]]), 0)[0, 0] for group in own]
            for row, own in zip(x, chosen, strict=True)
        ]
    )
    weight = replace(weight, order=order[0] if orders == 1 else order)
    assert_near(gathered_matmul(weight, x, chosen, implementation=implementation), wanted, 0.01)


def in_numpy(weight, x, chosen, axis, bias=None, epilogue=SUMS, weights=None, threads=NumpyThreads):
    """Runs the kernel's code for each of its blocks."""
    geometry = sizes.Geometry.of(weight, x, chosen, group_axis=axis)
    assert geometry.refusal() is None
    has = {"bias": None if bias is None else bias.dtype, "summed": weights is not None}
    geometry = replace(geometry, **has, epilogue=epilogue)
    shape = (*chosen.shape[: 1 if geometry.summed else 2], geometry.results)
    out = np.full(np.prod(shape), np.nan, epilogue.result)
    parts = [np.asarray(part).reshape(-1) for part in jax.tree.leaves((weights, bias, weight))]
    scratch = mosaic_four_bits.scratch(geometry) if geometry.is_tiled else ()
    for block in range(geometry.blocks):
        mosaic_gpu.code_for(geometry)(
            threads(),
            x.reshape(-1),
            chosen.reshape(-1),
            *parts,
            out,
            *(np.full(size, np.nan, np.float32) for size in scratch),
            np.full(128, block, np.int32),
            geometry=geometry,
        )
    return jnp.asarray(out.reshape(shape))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_the_kernels_code_multiplies_weights_of_every_form(kind, dtype):
    """Rows of 160 to 1280 bytes: a lane has no piece, one, or several; some warps have columns that are not there."""
    for inner, shape in ((640, SHAPES[0]), (1280, SHAPES[1])):
        if kind is not None and inner % (KINDS[kind][1] or 1):
            continue
        weight, x, chosen = made(kind, inner, shape, dtype)
        wanted = by_hand(weight, x, chosen, shape[-1])
        assert_near(in_numpy(weight, x, chosen, shape[-1]), wanted, 1e-5)


@pytest.mark.parametrize(
    ("kind", "inner"),
    [
        *((kind, 160) for kind in ("mxfp4", "int4 by 32, float32", "int4 by row")),
        *((kind, 192) for kind in ("int4 by 96", "int4 by 32, float32", "int4 by 32, float16")),
    ],
)
def test_the_kernels_code_loads_the_scales_of_pieces_wherever_they_begin(kind, inner):
    """One by one where a row has an odd number of them, or two pieces may have one or two."""
    weight, x, chosen = made(kind, inner, SHAPES[0])
    assert_near(in_numpy(weight, x, chosen, 0), by_hand(weight, x, chosen, 0), 1e-5)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def gelu_tanh(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


EPILOGUES = {
    "silu gate": (
        {"activation": "silu", "gated": True},
        lambda gate, up: gate * sigmoid(gate) * up,
    ),
    "gelu_tanh gate": (
        {"activation": "gelu_tanh", "gated": True},
        lambda gate, up: gelu_tanh(gate) * up,
    ),
    "gelu gate": ({"activation": "gelu", "gated": True}, lambda gate, up: gelu(gate) * up),
    "silu": ({"activation": "silu"}, lambda x: x * sigmoid(x)),
    "relu2": ({"activation": "relu2"}, lambda x: np.maximum(x, 0) ** 2),
    "clamped gate": (
        {"clamp": 1.5, "gated": True},
        lambda gate, up: (
            (np.clip(up, -1.5, 1.5) + 1)
            * np.minimum(gate, 1.5)
            * sigmoid(1.702 * np.minimum(gate, 1.5))
        ),
    ),
    "sums": ({}, lambda x: x),
}


def ended(name, sums):
    """Returns the results of sums in float64."""
    options, end = EPILOGUES[name]
    return end(*np.split(sums, 2, axis=-1)) if options.get("gated") else end(sums)


@implementations("xla", "code", "mosaic_gpu")
@pytest.mark.parametrize("name", EPILOGUES)
def test_sums_end_with_bias_and_activation(implementation, name):
    """Sums are of either sign, some beyond the clamp."""
    for kind, shape, result, bias_dtype in (
        (None, (2, 3, 5, 38, 0), jnp.float32, None),
        ("e4m3 by row", (2, 3, 5, 38, 0), jnp.bfloat16, jnp.bfloat16),
        ("mxfp4", (4, 1, 3, 6, 1), jnp.float16, jnp.float32),
    ):
        weight, x, chosen = made(kind, 256, shape)
        groups, out, axis = shape[2:]
        sums = by_hand(weight, x, chosen, axis)
        x = (x.astype(np.float32) * np.float32(8 / np.abs(sums).max())).astype(x.dtype)
        sums, bias = by_hand(weight, x, chosen, axis), None
        if bias_dtype is not None:
            draw = np.random.default_rng(3).normal(size=(groups, out))
            bias = (draw * np.abs(sums).max()).astype(bias_dtype)
            sums = sums + bias[chosen].astype(np.float64)
        options, _ = EPILOGUES[name]
        epilogue = Epilogue(**options, result=jnp.dtype(result))
        if implementation == "code" and not mosaic_gpu._has(epilogue):
            pytest.skip("XLA computes it from the sums")
        if implementation == "code":
            got = in_numpy(weight, x, chosen, axis, bias, epilogue)
        else:
            options = options | {"bias": bias, "group_axis": axis, "result": result}
            got = gathered_matmul(weight, x, chosen, **options, implementation=implementation)
        wanted = ended(name, sums)
        assert np.isfinite(wanted).all()
        tolerance = max(2e-5, jnp.finfo(result).eps) if implementation != "xla" else 0.01
        assert_near(got, wanted, tolerance, result)


@implementations("xla", "code", "mosaic_gpu")
# Scales of rows, of pieces, zero points, and none; what is done with a piece is that of the forms above.
@pytest.mark.parametrize(
    ("kind", "each"),
    [
        *((None, True), (None, False), ("e4m3 by row", True)),
        *(("int4 by 128, zeros", True), ("mxfp4", True), ("mxfp4", False), ("int4 by row", True)),
    ],
)
def test_a_rows_choices_may_be_added_up_with_weights(implementation, kind, each, monkeypatch):
    """Columns that warps share evenly, or do not, and more choices than a warp reads at once."""
    inner = {None: 64, "e4m3 by row": 256}.get(kind, 1280)
    monkeypatch.setattr(mosaic_four_bits, "_AT_ONCE_OF_SUMS", 2)
    for count, out, axis, has_bias, result in (
        (5, 8, 1, False, jnp.bfloat16),
        (11, 5, 0, True, jnp.float32),
        (1, 1, 1, True, jnp.float32),
    ):
        if count == 11:
            # As if there were warps for all multiprocessors: several columns for each.
            monkeypatch.setattr(sizes, "_ENOUGH_WARPS", 0)
        weight, x, chosen = made(kind, inner, (3, count, 4, out, axis))
        draw = np.random.default_rng(7)
        weights = draw.normal(size=chosen.shape).astype(np.float32)
        x = draw.normal(size=(3 * count if each else 3, inner)).astype(x.dtype)
        bias = draw.normal(size=(4, out)).astype(np.float32) if has_bias else None
        wanted = by_hand(weight, x, chosen, axis, weights)
        if bias is not None:
            wanted = wanted + np.einsum("rco,rc->ro", bias[chosen].astype(np.float64), weights)
        if implementation == "code":
            epilogue = Epilogue(result=jnp.dtype(result))
            got = in_numpy(weight, x, chosen, axis, bias, epilogue, weights)
        else:
            options = {"bias": bias, "group_axis": axis, "result": result}
            run = jax.jit(partial(gathered_matmul, **options, implementation=implementation))
            got = run(weight, x, chosen, weights=weights)
        tolerance = max(1e-5, jnp.finfo(result).eps) if implementation != "xla" else 0.01
        assert_near(got, wanted, tolerance, result)


@pytest.mark.parametrize("name", sorted(EPILOGUES.keys() - {"gelu gate"}))
def test_the_kernels_epilogues_pass_nan_and_infinity_on_as_xla_does(name):
    weight, x, chosen = made(None, 128, (4, 1, 3, 8, 0))
    x[0, 0], x[1, 0], x[2, 0] = np.nan, np.inf, -np.inf
    weight[..., 0] = 1
    options, _ = EPILOGUES[name]
    with np.errstate(all="ignore"):
        got = np.asarray(in_numpy(weight, x, chosen, 0, epilogue=Epilogue(**options)))
    wanted = np.asarray(gathered_matmul(weight, x, chosen, **options, implementation="xla"))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert np.isnan(got[0]).all()


# The tests above have the code for every form and epilogue.
@pytest.mark.parametrize(
    "kind",
    [
        "int4 by 128, zeros",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (None, "e4m3 by 128", "mxfp4")),
    ],
)
def test_interpreted_the_kernel_does_the_same_without_a_race(kind, races):
    weight, x, chosen = made(kind, 256, (2, 2, 3, 12, 0))
    arrays = jax.tree.map(jnp.asarray, (weight, x, chosen))
    epilogue = Epilogue("silu", gated=True, result=jnp.dtype(jnp.bfloat16))
    got = mosaic_gpu.gathered_matmul(*arrays, epilogue=epilogue, interpret=True).reshape(2, 2, 6)
    wanted = ended("silu gate", by_hand(weight, x, chosen, 0))
    assert_near(got, wanted, 2**-8, jnp.bfloat16)
    weights = jnp.asarray([[0.5, 2.0], [-1.0, 3.0]], jnp.float32)
    added = mosaic_gpu.gathered_matmul(*arrays, None, weights, interpret=True)
    assert_near(added, by_hand(weight, x, chosen, 0, np.asarray(weights)), 1e-5)
    assert not races()


@pytest.mark.parametrize("number", [0, 1])
def test_each_barrier_of_a_tile_is_needed(number):
    weight, x, chosen = made("mxfp4", 640, (1, 1, 2, 5, 0))
    in_numpy(weight, x, chosen, 0, threads=without_barrier(2))
    with pytest.raises(Race):
        in_numpy(weight, x, chosen, 0, threads=without_barrier(number))


def test_matrices_that_nobody_chooses_and_other_rows_do_not_matter():
    weight, x, _ = made(None, 128, SHAPES[0])
    chosen = np.array([[0, 2], [2, 3]], np.int32)
    weight[[1, 4]] = np.nan
    whole = np.asarray(in_numpy(weight, x, chosen, 0))
    assert np.isfinite(whole).all()
    alone = np.asarray(in_numpy(weight, x[1:], chosen[1:], 0))
    np.testing.assert_array_equal(alone[0], whole[1])


def every_code(code):
    """Returns a weight of four rows with all codes but NaN, and one row of NaN, and what it stands for."""
    stored = np.arange(4 * 64, dtype=np.uint8).reshape(4, 64)
    if code == "float8_e4m3fn":
        stored[stored % 128 == 127] -= 1
    stored = np.vstack((stored, stored[:1])).view(np.dtype(CODES[code].stored))
    # 2, the least number, 1, 8 and NaN.
    scale = np.array([[128], [0], [127], [130], [255]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    weight = FewBits(stored[None], scale[None], None, None, code)
    return weight, exact(weight)[0].astype(np.float32)


@implementations("code", "mosaic_gpu")
@pytest.mark.parametrize("code", CODES)
def test_every_code_and_scale_is_the_number_that_it_stands_for(implementation, code):
    """Rows of x choose one column each, so a result is one number of the weight."""
    weight, wanted = every_code(code)
    inner = wanted.shape[1]
    x, chosen = np.eye(inner, dtype=ml_dtypes.bfloat16), np.zeros((inner, 1), np.int32)
    if implementation == "code":
        got = np.asarray(in_numpy(weight, x, chosen, 0))[:, 0].T
    else:
        got = gathered_matmul(weight, x, chosen, implementation="mosaic_gpu")
        got = np.asarray(got)[:, 0].T
    # Subnormal numbers may be flushed on a CPU.
    np.testing.assert_allclose(got[:4], wanted[:4], rtol=0, atol=2.0**-126)
    # NaN times 0 is NaN, so it is in all sums of its row.
    assert np.isnan(got[4]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu_rows_of_many_lengths_have_the_bits_that_they_have_alone(kind, dtype):
    for inner, shape in (
        (2048, (9, 5, 40, 512, 0)),
        (2880, (3, 4, 8, 202, 0)),
        (7168, (17, 1, 5, 40, 1)),
        (384, (2, 2, 3, 1, 1)),
    ):
        if kind is not None and inner % (KINDS[kind][1] or 32):
            continue
        weight, x, chosen = made(kind, inner, shape, dtype)
        run = jax.jit(
            lambda *arrays, axis=shape[-1]: gathered_matmul(
                *arrays, group_axis=axis, implementation="mosaic_gpu"
            )
        )
        got = np.asarray(run(weight, x, chosen))
        assert_near(jnp.asarray(got), by_hand(weight, x, chosen, shape[-1]), 1e-5)
        np.testing.assert_array_equal(run(weight, x[-1:], chosen[-1:]), got[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "int4 by 32, float32", "int4 by 32, float16"])
def test_on_a_gpu_sums_of_choices_have_the_bits_that_they_have_alone(kind):
    for inner, shape in (
        (2880, (3, 4, 8, 202, 0)),
        (7168, (2, 3, 5, 40, 1)),
        (512, (9, 10, 40, 2048, 1)),
    ):
        if inner % ((KINDS | ODD_KINDS)[kind][1] or 32):
            continue
        weight, _, chosen = made(kind, inner, shape)
        draw = np.random.default_rng(5)
        x = draw.normal(size=(chosen.size, inner)).astype(ml_dtypes.bfloat16)
        weights = draw.normal(size=chosen.shape).astype(np.float32)
        run = jax.jit(
            lambda weight, x, chosen, weights, axis=shape[-1]: gathered_matmul(
                weight, x, chosen, weights=weights, group_axis=axis, implementation="mosaic_gpu"
            )
        )
        got = run(weight, x, chosen, weights)
        assert_near(got, by_hand(weight, x, chosen, shape[-1], weights), 1e-5)
        alone = run(weight, x[-shape[1] :], chosen[-1:], weights[-1:])
        np.testing.assert_array_equal(alone[0], got[-1])


def test_wrong_arguments_are_told(as_in_production):
    weight, x, chosen = made(None, 64, SHAPES[0])
    with pytest.raises(ValueError, match="group_axis must be 0 or 1"):
        gathered_matmul(weight, x, chosen, group_axis=2)
    with pytest.raises(ValueError, match="there are 5 groups, but a row chooses group 5"):
        gathered_matmul(weight, x, np.full_like(chosen, 5))
    with pytest.raises(ValueError, match="negative"):
        gathered_matmul(weight, x, chosen - 9)
    with pytest.raises(ValueError, match="must share one floating dtype, got bfloat16 and float32"):
        gathered_matmul(weight, x.astype(np.float32), chosen)
    with pytest.raises(ValueError, match="shape"):
        gathered_matmul(weight, x[:, :32], chosen)
    with pytest.raises(ValueError, match=r"or each choice, got 2 rows for \[1, 3\]"):
        gathered_matmul(weight, x, chosen[:1])
    for options, words in (
        ({"bias": np.zeros((5, 36), np.float32)}, r"bias must have shape \[5, 37\]"),
        ({"bias": np.zeros((5, 37))}, "bias must be float32, bfloat16 or float16, got float64"),
        ({"activation": "tanh"}, "activation must be one of silu"),
        ({"activation": "silu", "gated": True}, "must have two rows for each column, got 37"),
        ({"gated": True}, "need an activation or a clamp"),
        ({"weights": np.ones((2, 2), np.float32)}, r"weights must have shape \[2, 3\]"),
        ({"weights": np.ones((2, 3))}, "weights must be float32"),
        ({"weights": np.ones((2, 3), np.float32), "activation": "silu"}, "take no activation"),
        ({"clamp": 7.0}, "clamp takes gated products"),
        ({"clamp": 7.0, "gated": True, "activation": "silu"}, "no activation, got gated=True"),
    ):
        with pytest.raises(ValueError, match=words):
            gathered_matmul(weight, x, chosen, **options)
    with pytest.raises(Unsupported, match="mosaic_gpu"):
        gathered_matmul(
            weight.astype(np.float32), x.astype(np.float32), chosen, implementation="mosaic_gpu"
        )


def test_sizes_that_the_kernel_does_not_take_are_a_fallback(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "why_not", mosaic_gpu.refusal)
    before = sum(fallbacks().values())
    for dtype, inner in ((jnp.float32, 64), (jnp.bfloat16, 60)):
        weight, x = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((3, 8, inner), (2, inner)))
        jax.eval_shape(gathered_matmul, weight, x, jax.ShapeDtypeStruct((2, 2), jnp.int32))
    assert sum(fallbacks().values()) == before + 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"inner": 100}, "multiple of 16"),
        ({"dtype": jnp.float32}, "bfloat16 or float16"),
        ({"scales": 32}, "groups of columns must be multiples of 16, got 8"),
        ({"scale": jnp.float64}, "scales must be"),
        ({"groups": 2**15, "out": 2**15}, "at most 2147483647 words"),
        ({"rows": 0}, "there must be rows"),
        (
            {"kind": "int4", "inner": 2**15, "count": 4, "each": True},
            "at most 98304 numbers of x, got 131072",
        ),
    ],
)
def test_what_the_kernel_does_not_take_has_a_reason(change, reason):
    geometry = sizes.Geometry(
        2, 3, 4, 8, 256, 0, jnp.bfloat16, "float8_e4m3fn", scales=2, scale=jnp.float32
    )
    assert geometry.refusal() is None
    assert reason in replace(geometry, **change).refusal()

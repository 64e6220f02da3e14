"""The Mosaic GPU kernel of `skinny_matmul` itself: interpreted, and how it cuts weights. Contract: its own suite."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.argument_weights import argument_weights
from pallas_kernels.device import (
    NEWEST_JAX,
    RESERVED_BYTES_PER_BLOCK,
    SHARED_BYTES,
    SHARED_BYTES_PER_BLOCK,
)
from pallas_kernels.fixed_order import fixed_order
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.mosaic import jax_versions
from pallas_kernels.mosaic.few_bits_turn import Packing
from pallas_kernels.skinny_matmul import mosaic_gpu, mosaic_join, mosaic_tiling
from pallas_kernels.skinny_matmul.arguments import MatmulArrays, MatmulOptions
from pallas_kernels.skinny_matmul.cases import CASES, Case
from pallas_kernels.skinny_matmul.mosaic_geometry import Geometry
from pallas_kernels.skinny_matmul.mosaic_schedule import Schedule
from pallas_kernels.skinny_matmul.mosaic_tiling import Tiling
from pallas_kernels.tuning import trying
from tests.fast_cases import fast_cases
from tests.pallas_kernels.contract import bits, by_name, device
from tests.pallas_kernels.few_bits import drawn, exact, rounded, rounded_rows
from tests.pallas_kernels.skinny_matmul.test_skinny_matmul import oracle
from tests.tolerances import assert_output

pytestmark = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="the kernels refuse this JAX; why_not says so"
)
BFLOAT16 = jnp.dtype(jnp.bfloat16)
multiply = by_name(mosaic_gpu.skinny_matmul, MatmulArrays, MatmulOptions)

# Every way of cutting, alone and with others: columns, folds, depth, stages, splits, blocks.
CUTS = {
    "one tile per block": (Case("", 3, 256, 128), (64, 1, 1, 3, 1, 9)),
    "tiles in turn, the last one early": (
        Case("", 9, 256, 200, has_bias=True),
        (64, 1, 1, 3, 1, 2),
    ),
    "folds": (Case("", 5, 512, 64, has_residual=True), (16, 4, 1, 2, 1, 9)),
    "fewer rows of the weight than a product has": (
        Case("", 5, 512, 64, True, "silu", 0.5, True, True),
        (16, 1, 2, 3, 1, 2),
    ),
    "deep chunks": (Case("", 1, 512, 64, activation="relu2"), (32, 2, 2, 9, 1, 9)),
    "splits": (
        Case("", 17, 512, 64, True, "silu", 0.5, True, True),
        (32, 1, 1, 2, 4, 9),
    ),
    "gates and folds": (
        Case("", 2, 512, 72, True, "gelu_tanh", 1.0, True, True),
        (8, 4, 1, 3, 1, 4),
    ),
    "two heights": (Case("", 8, 128, 128, result="float32"), (128, 1, 1, 2, 1, 9)),
    "passes": (
        Case("", 21, 128, 200, True, "silu", 0.5, True, True),
        (64, 1, 1, 2, 1, 2, 1, 2),
    ),
    "a pass of one row": (Case("", 17, 128, 128, has_residual=True), (64, 1, 1, 2, 1, 9, 1, 3)),
    # No interpreter knows a cluster's stores: here XLA adds up its shares, in the same order.
    "a cluster": (
        Case("", 17, 256, 64, has_bias=True, has_residual=True),
        (64, 1, 1, 2, 1, 9, 2),
    ),
}


# What the others cut is in these too, with more beside it, and tiles in turn are in the test of a norm after them.
FAST_CUTS = (
    *("fewer rows of the weight than a product has", "splits"),
    *("gates and folds", "passes", "a cluster"),
)


@pytest.mark.parametrize("name", fast_cases(CUTS, *FAST_CUTS))
def test_interpreted_it_equals_the_oracle_without_a_race(name, races):
    case, cuts = CUTS[name]
    inputs = case.inputs(1)
    result = multiply(**device(inputs), schedule=Schedule(*cuts), interpret=True)
    assert result.dtype == jnp.dtype(case.result or "bfloat16")
    assert_output(result, oracle(inputs), "bfloat16")
    assert not races()


def test_interpreted_rows_do_not_see_each_other():
    """Permuted rows, and a row beside NaN, have equal bits, for every weight that is stacked with theirs."""
    case, cuts = CUTS["folds"]
    inputs = case.inputs(2)
    order = np.array([4, 2, 0, 3, 1])
    poisoned = inputs["x"].copy()
    poisoned[1::2] = np.nan

    def run(**change):
        given = device(inputs | change)
        return bits(multiply(**given, schedule=Schedule(*cuts), interpret=True))

    first = run()
    assert run(x=inputs["x"][order], residual=inputs["residual"][order]) == [
        first[row] for row in order
    ]
    assert run(x=poisoned)[::2] == first[::2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_rules_fit_every_case_into_one_wave(case):
    """All blocks of a real shape are at work at once, and each of them does as much as the others."""
    geometry = Geometry(case.rows, case.out, case.inner, case.gated, BFLOAT16)
    if geometry.refusal() is not None or not case.rows:
        pytest.skip("the kernel does not take it")
    schedule = Schedule.by_rule(geometry)
    assert schedule.refusal(geometry) is None
    assert schedule.shared_bytes(geometry) <= SHARED_BYTES_PER_BLOCK
    blocks = schedule.grid(geometry) * schedule.shares
    resident = SHARED_BYTES // (schedule.shared_bytes(geometry) + RESERVED_BYTES_PER_BLOCK)
    assert blocks <= 132 * resident
    if not case.ci:
        assert blocks >= 96
        done = schedule.grid(geometry) * schedule.tiles_per_block(geometry)
        assert done <= 1.05 * schedule.tiles(geometry)


@pytest.mark.parametrize("rows", [33, 40, 57, 64])
@pytest.mark.parametrize(
    ("inner", "out", "gated", "columns", "folds", "depth", "cluster", "eight"),
    [
        (4096, 4096, False, 32, 2, 1, 1, False),
        (4096, 6144, False, 64, 1, 2, 1, False),
        (14336, 4096, False, 64, 1, 2, 2, False),
        (4096, 14336, True, 64, 1, 2, 1, True),
    ],
)
def test_many_rows_take_clusters_where_inner_is_long_and_passes_where_gates_are_wide(
    rows, inner, out, gated, columns, folds, depth, cluster, eight
):
    geometry = Geometry(rows, out, inner, gated, BFLOAT16)
    found = Schedule.by_rule(geometry)
    assert (found.columns, found.folds, found.depth, found.splits) == (columns, folds, depth, 1)
    assert (found.cluster, found.window(geometry) == 8) == (cluster, eight)
    few = Schedule.by_rule(replace(geometry, rows=32))
    assert (few.cluster, few.passes) == (1, 1)


@pytest.mark.parametrize(
    ("inner", "out", "folds"), [(8192, 2560, 4), (4096, 4096, 4), (3072, 1024, 8), (2048, 8192, 2)]
)
def test_a_weight_is_folded_eight_times_only_where_four_leave_the_card_idle(inner, out, folds):
    found = Schedule.by_rule(Geometry(8, out, inner, False, BFLOAT16))
    assert (found.folds, found.columns, found.splits) == (folds, 64 // folds, 1)


@pytest.mark.parametrize(("rows", "columns"), [(33, 64), (40, 64), (57, 32), (64, 32)])
def test_a_schedule_without_a_second_slot_is_never_chosen(rows, columns):
    """Passes would leave a third of the card without a block here, and 64 columns of many rows have room for one slot.

    With a single one the second turn would wait for what nobody has sent for.
    """
    geometry = Geometry(rows, 17408, 4096, True, BFLOAT16)
    found = Schedule.by_rule(geometry)
    assert (found.columns, found.cluster, found.passes) == (columns, 1, 1)
    assert found.stages > 1
    assert "need two slots" in str(replace(found, stages=1).refusal(geometry))


class Numbered:
    """Of which block of a cluster shared memory is, and which place in it."""

    at = property(lambda self: self)

    def __init__(self, block):
        self.block = block

    def __getitem__(self, place):
        return self.block, *place


class Sums:
    """An array of NumPy behind what a kernel does to a reference."""

    at = property(lambda self: self)

    def __init__(self, array):
        self.array = array

    def __getitem__(self, place):
        columns, rows = place
        return self.array[columns, rows.start : rows.start + rows.size]


@pytest.mark.parametrize("rows", [9, 16, 17, 33, 40, 57, 64])
def test_each_block_of_a_cluster_ends_its_rows_once_with_the_sums_of_both(rows, monkeypatch):
    """In NumPy, since no interpreter knows a cluster's stores; each block's barrier counts all that comes."""
    geometry = Geometry(rows, 64, 256, False, BFLOAT16)
    schedule = Schedule(64, 1, 1, 2, 1, 1, 2)
    assert schedule.refusal(geometry) is None
    arrivals = mosaic_join.shared(geometry, schedule)["shares_arrived"].num_arrivals
    window = schedule.window(geometry)
    sums = np.random.default_rng(0).normal(size=(2, 64, geometry.padded_rows)).astype("float32")
    received = np.full((2, 2, window // 8, 64, 8), np.nan, np.float32)
    joined = np.full((2, 64, window), np.nan, np.float32)
    result, counted = np.zeros((64, rows)), [0, 0]

    def send(values, place, barrier, *, cluster_idx, **_):
        received[int(cluster_idx)][place[1:]] = values
        counted[int(cluster_idx)] += 1

    for name, fake in {
        "async_store_smem": send,
        "barrier_wait": lambda _: None,
        "commit_smem": lambda: None,
        "load": lambda place, **_: received[place],
    }.items():
        monkeypatch.setattr(mosaic_join.plgpu, name, fake)
    # From JAX 0.12 on, it is an operation of kernels.
    monkeypatch.setattr(mosaic_join, "assign", np.ndarray.__setitem__)
    monkeypatch.setattr(mosaic_join.pl, "when", lambda is_so: lambda run: run() if is_so else None)
    joins = []
    for rank in range(2):
        refs = {"shares": Numbered(rank), "shares_arrived": None, "sums": Sums(joined[rank])}
        joins.append(mosaic_join.Join(geometry, schedule, refs, jnp.int32(rank)))
        joins[rank].send(jnp.asarray(sums[rank]))
    assert counted == [arrivals, arrivals]

    for rank, join in enumerate(joins):

        def store(first, count, rank=rank):
            result[:, first : first + count] += joined[rank, :, :count]

        join.deliver(jnp.asarray(sums[rank]), store)
    np.testing.assert_array_equal(result, (sums[0] + sums[1])[:, :rows])


def test_a_tuned_schedule_may_leave_out_clusters_and_passes():
    """Whoever wrote it knew neither; what names another field, or cannot run, is passed over."""
    geometry = Geometry(64, 4096, 14336, False, BFLOAT16)
    ruled = Schedule.of(geometry)
    fields = {"columns": 64, "folds": 1, "depth": 1, "stages": 3, "splits": 2, "blocks": 64}
    given = {
        Schedule(64, 1, 1, 3, 2, 64): fields,
        Schedule(64, 1, 1, 3, 1, 64, 2): fields | {"splits": 1, "cluster": 2},
    }
    for wanted, entry in given.items():
        with trying("skinny_matmul", entry):
            assert Schedule.of(geometry) == wanted
    for entry in (fields | {"warps": 1}, fields | {"stages": 99}, {"columns": 64}):
        with trying("skinny_matmul", entry):
            assert Schedule.of(geometry) == ruled


@pytest.mark.parametrize(
    ("cuts", "dtype"),
    # Tiles in turn and splits are fast.
    [
        pytest.param((32, 2, 1, 3, 1, 9), "bfloat16", marks=pytest.mark.slow),
        ((64, 1, 1, 3, 1, 1), "float32"),
        ((64, 1, 1, 2, 2, 9), "bfloat16"),
        pytest.param((64, 1, 1, 3, 1, 1, 1, 2), "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_interpreted_a_norm_is_left_to_the_product_after_it(cuts, dtype, races):
    """Tiles alone and in turn, and splits: the squares are those of the rows as they were rounded.

    The norm's weights may have another dtype than the rows.
    """
    case = Case("", 5, 256, 128)
    inputs = case.inputs(3)
    squares = np.linspace(0.1, 0.9, 6 * 5, dtype=np.float32).reshape(6, 5) * 256
    norm = np.linspace(0.5, 2, 128).astype(jnp.dtype(dtype))
    given = inputs | {"squares": squares, "norm_eps": 0.5, "next_norm": norm[None]}
    result, weighed, found = multiply(**device(given), schedule=Schedule(*cuts), interpret=True)
    root = np.sqrt(squares.astype(np.float64).sum(axis=0) / 256 + 0.5)
    assert_output(result, oracle(inputs) / root[:, None], "bfloat16")
    wide = np.asarray(result, np.float64)
    assert_output(weighed, wide * norm.astype(np.float64), "bfloat16")
    np.testing.assert_allclose(np.sum(found, axis=0), np.sum(wide**2, axis=1), rtol=2e-3)
    assert not races()


FEW_BITS = {
    "e4m3 by row": (3, 512, (32, 2, 1, 2, 1, 9)),
    "e4m3 by 128": (9, 256, (64, 1, 1, 2, 1, 1)),
    "int8 by 32": (3, 448, (64, 1, 1, 3, 1, 9)),
    "int4 by 128": (17, 512, (64, 1, 1, 2, 1, 9, 2)),
    "int4 by 128, zeros": (2, 1024, (16, 4, 1, 2, 1, 9)),
    "int4 by 64, zeros": (40, 448, (64, 1, 1, 2, 1, 1)),
    "mxfp4": (3, 320, (64, 1, 1, 2, 1, 9)),
}


@pytest.mark.parametrize(
    "name",
    # What is copied early is a tile of the weight, whether it is folded or not.
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("folds", "gates and folds")),
        "tiles in turn, the last one early",
    ],
)
def test_interpreted_early_copies_of_the_weight_change_no_bit(name, races, monkeypatch):
    monkeypatch.setattr(jax_versions, "OVERLAPS_LAUNCHES", True)
    case, cuts = CUTS[name]
    inputs = device(case.inputs(1))
    options = {"schedule": Schedule(*cuts), "interpret": True}
    late = multiply(**inputs, **options)
    with argument_weights():
        assert "of_argument" in str(jax.make_jaxpr(lambda: multiply(**inputs, **options))())
        early = multiply(**inputs, **options)
    assert bits(early) == bits(late)
    assert not races()


# Codes of 8 bits and of 4, alone and in a cluster; the other forms of scales are among those by warp.
FAST = ["e4m3 by 128", "int4 by 128"]
SLOW = [kind for kind in FEW_BITS if kind not in FAST]


# A fold has two products of a warpgroup, one warp's, two warps', or the whole tile; with one and many scales per turn.
BY_WARP = {
    "e4m3 by row": (9, 512, (128, 2, 1, 2, 1, 9, 1, 1, True)),
    "int8 by 32": (3, 1024, (16, 4, 1, 2, 1, 9, 1, 1, True)),
    "int4 by 128, zeros": (16, 2048, (32, 2, 2, 2, 1, 2, 1, 1, True)),
    "mxfp4": (2, 1536, (64, 1, 2, 2, 1, 9, 1, 1, True)),
}


@pytest.mark.parametrize(
    ("kind", "cut"),
    [(kind, FEW_BITS[kind]) for kind in FAST]
    # Groups with zero points, and scales of their own kind; the forms of 8 bits are slow.
    + [
        pytest.param(*item, marks=[pytest.mark.slow] * ("by" in item[0] and "zeros" not in item[0]))
        for item in BY_WARP.items()
    ]
    + [pytest.param(kind, FEW_BITS[kind], marks=pytest.mark.slow) for kind in SLOW],
)
def test_interpreted_weights_in_few_bits_are_exact(kind, cut, races):
    """With hostile scales, and in every way of cutting; also where pieces of a row are narrower than 128 bytes."""
    rows, inner, cuts = cut
    weight = drawn(kind, (128,), inner, hostile=True)
    x = np.random.default_rng(1).normal(size=(rows, inner)).astype(jnp.bfloat16)
    given = jax.tree.map(jnp.asarray, {"weight": weight, "x": x})
    found = multiply(**given, result="float32", schedule=Schedule(*cuts), interpret=True)
    wide, exactly = x.astype(np.float64), exact(weight)
    error = np.abs(np.asarray(found, np.float64) - wide @ exactly.T)
    assert np.all(error <= 1e-6 * (np.abs(wide) @ np.abs(exactly).T))
    assert not races()


# A scale per row, and of groups that are shorter than a turn or not, with and without zero points; two consumers,
# several tiles per block, clusters, a last tile of fewer rows and columns.
MANY_ROWS_IN_FEW_BITS = {
    "e4m3 by row": (70, 128, 128, None),
    "int4 by 64, zeros": (100, 192, 128, (64, 2, 2, 1, 1)),
    "int8 by 32": (66, 128, 128, (32, 1, 3, 2, 2)),
    "mxfp4": (70, 128, 136, (96, 1, 2)),
}


@pytest.mark.usefixtures("races_may_follow")
# Groups that are no longer than a turn, in a cluster, are fast; the gated weight below has long ones with zero points.
# Codes of the other kinds are widened by what tests of few rows run, and rounded rows below have scales per row.
@pytest.mark.parametrize("kind", fast_cases(MANY_ROWS_IN_FEW_BITS, "int8 by 32"))
def test_interpreted_many_rows_widen_weights_in_few_bits_exactly(kind, races):
    """With hostile scales; scaled numbers of groups are rounded to x's dtype once."""
    rows, inner, out, tiling = MANY_ROWS_IN_FEW_BITS[kind]
    weight = drawn(kind, (out,), inner, hostile=True)
    x = np.random.default_rng(1).normal(size=(rows, inner)).astype(jnp.bfloat16)
    given = jax.tree.map(jnp.asarray, {"weight": weight, "x": x})
    options = {} if tiling is None else {"tiling": Tiling(*tiling)}
    found = multiply(**given, result="float32", interpret=True, **options)
    wide, weights = x.astype(np.float64), rounded(weight)
    error = np.abs(np.asarray(found, np.float64) - wide @ weights.T)
    assert np.all(error <= 1e-6 * (np.abs(wide) @ np.abs(weights).T))
    # A last tile that is shifted so that it is whole stores its neighbour's columns again.
    assert out % 128 or not races()


# The tiling of the rule is that of the gated weight below.
@pytest.mark.parametrize("tiling", [pytest.param(None, marks=pytest.mark.slow), (64, 2, 2, 1, 1)])
def test_interpreted_rounded_rows_are_multiplied_with_codes_as_they_lie(tiling, races):
    """With a norm before the product, whose factors multiply the scales of the rows."""
    weight = replace(drawn("e4m3 by row", (128,), 256), rounds_rows=True)
    x = np.random.default_rng(1).normal(size=(100, 256)).astype(jnp.bfloat16)
    squares = np.linspace(0.1, 0.9, 2 * 100, dtype=np.float32).reshape(2, 100) * 256
    given = {"weight": weight, "x": x, "squares": squares, "norm_eps": 0.5, "result": "float32"}
    options = {} if tiling is None else {"tiling": Tiling(*tiling)}
    found = multiply(**device(given), interpret=True, **options)
    root = np.sqrt(squares.astype(np.float64).sum(axis=0) / 256 + 0.5)[:, None]
    wide, weights = rounded_rows(x) / root, exact(weight)
    error = np.abs(np.asarray(found, np.float64) - wide @ weights.T)
    assert np.all(error <= 1e-6 * (np.abs(wide) @ np.abs(weights).T))
    assert not races()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_interpreted_rounded_rows_of_a_gated_weight_are_weighed_with_every_part_of_the_epilogue(
    dtype,
):
    case = Case("", 70, 256, 64, True, "silu", 0.5, True, True)
    weight = replace(drawn("e4m3 by row", (128,), 256), rounds_rows=True)
    inputs = case.inputs(1, dtype) | {"weight": weight}
    norm = np.linspace(0.5, 2, 64).astype(dtype)
    squares = np.linspace(0.1, 0.9, 2 * 70, dtype=np.float32).reshape(2, 70) * 256
    given = inputs | {"squares": squares, "norm_eps": 0.5, "next_norm": norm[None]}
    result, weighed, added = multiply(**device(given), interpret=True)
    root = np.sqrt(squares.astype(np.float64).sum(axis=0) / 256 + 0.5)[:, None]
    wanted = oracle(inputs | {"weight": exact(weight), "x": rounded_rows(inputs["x"]) / root})
    assert_output(result, wanted, dtype)
    assert_output(weighed, wanted * norm.astype(np.float64), dtype)
    wanted = np.sum(np.asarray(result, np.float64) ** 2, axis=1)
    np.testing.assert_allclose(np.sum(added, axis=0), wanted, rtol=1e-5)


def test_interpreted_a_norm_after_tiles_has_the_squares_of_a_consumer():
    """Tiles of few rows under the given schedule are wider."""
    weight = drawn("int8 by row", (128,), 128)
    x = np.random.default_rng(1).normal(size=(70, 128)).astype(jnp.bfloat16)
    norm = np.ones((1, 128), jnp.bfloat16)
    given = device({"weight": weight, "x": x, "next_norm": norm, "result": "float32"})
    schedule = Schedule(128, 1, 1, 1, 1, 1)
    result, _, squares = multiply(**given, schedule=schedule, interpret=True)
    wanted = np.sum(np.asarray(result, np.float64) ** 2, axis=1)
    np.testing.assert_allclose(np.sum(squares, axis=0), wanted, rtol=1e-5)


def test_interpreted_many_rows_of_a_gated_weight_in_few_bits_have_the_scales_of_both_halves(races):
    """With every part of the epilogue that a prompt's product has."""
    case = Case("", 70, 256, 64, True, "silu", 0.5, True, True)
    weight = drawn("int4 by 128, zeros", (128,), 256)
    inputs = case.inputs(1) | {"weight": weight}
    result = multiply(**device(inputs), tiling=Tiling(96, 2, 2), interpret=True)
    assert_output(result, oracle(inputs | {"weight": rounded(weight)}), "bfloat16")
    assert not races()


# What the rule chooses is by warp, as in the tests above.
@pytest.mark.parametrize("cuts", [pytest.param(None, marks=pytest.mark.slow), (32, 1, 1, 2, 1, 1)])
def test_interpreted_a_gated_weight_in_few_bits_has_its_scales_in_both_halves(cuts, races):
    """With a bias, a residual and the norms on both sides; under a rule's own schedule, and with wgmma."""
    case = Case("", 5, 512, 64, True, "silu", 0.5, True, True)
    weight = drawn("int4 by 32", (128,), 512)
    squares = np.linspace(0.1, 0.9, 6 * 5, dtype=np.float32).reshape(6, 5) * 512
    norm = np.linspace(0.5, 2, 64).astype(jnp.bfloat16)
    inputs = case.inputs(1) | {"weight": weight}
    given = inputs | {"squares": squares, "norm_eps": 0.5, "next_norm": norm[None]}
    schedule = None if cuts is None else Schedule(*cuts)
    result, weighed, _ = multiply(**device(given), schedule=schedule, interpret=True)
    root = np.sqrt(squares.astype(np.float64).sum(axis=0) / 512 + 0.5)[:, None]
    x = np.asarray(inputs["x"], np.float64) / root
    wanted = oracle(inputs | {"weight": exact(weight), "x": x})
    assert_output(result, wanted, "bfloat16")
    assert_output(weighed, wanted * norm.astype(np.float64), "bfloat16")
    assert not races()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": jnp.float8_e4m3fn}, "scales must be one of float32, bfloat16, float16"),
        ({"group": 16}, "a multiple of 32 columns, got 16"),
        ({"inner": 480}, "multiple of 64, got 480"),
    ],
)
def test_the_kernel_says_which_weights_in_few_bits_it_cannot_take(change, message):
    given = {"scales": jnp.float32, "group": 32, "inner": 512} | change
    codes = jnp.zeros((64, given["inner"] // 2), jnp.uint8)
    scales = jnp.ones((64, given["inner"] // given["group"]), given["scales"])
    weight = FewBits(codes, scales, None, None, "int4")
    x = jnp.zeros((1, given["inner"]), jnp.bfloat16)
    assert message in (Geometry.of(weight, x, gated=False).refusal() or "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_the_fixed_order_columns_depend_on_the_weight_alone_and_nothing_is_folded(case):
    """So the parts of the sums of squares are equal too; every schedule runs, up to 64 rows at a time."""
    geometry = Geometry(1, case.out, case.inner, case.gated, BFLOAT16)
    if geometry.refusal() is not None:
        pytest.skip("the kernel does not take it")
    orders = set()
    for rows in (1, 8, 9, 16, 33, 64):
        padded = replace(geometry, rows=rows)
        schedule = Schedule.in_fixed_order(padded)
        assert schedule.refusal(padded) is None
        assert (schedule.folds, schedule.shares) == (1, 1)
        orders.add(schedule.columns)
    assert len(orders) == 1


@pytest.mark.parametrize(
    ("code", "group"), [("float8_e4m3fn", None), ("int4", 128), ("float4_e2m1fn", 32)]
)
def test_every_weight_in_few_bits_has_a_schedule_in_either_order(code, group):
    """Also where rows of x take more memory than codes; in the fixed order it depends on the weight alone."""
    shapes = {(case.out, case.inner, case.gated) for case in CASES}
    shapes |= {(8960, 1536, True), (18944, 3584, True), (5760, 2880, False), (17408, 5120, True)}
    count = 0
    for out, inner, gated in shapes:
        packing = Packing(code, group or inner, inner // (group or inner), "float32", False)
        orders = set()
        for rows in (1, 8, 9, 17, 33, 64):
            geometry = Geometry(rows, out, inner, gated, BFLOAT16, packing)
            if geometry.refusal() is not None:
                continue
            ruled, fixed = Schedule.by_rule(geometry), Schedule.in_fixed_order(geometry)
            assert ruled.refusal(geometry) is None
            assert fixed.refusal(geometry) is None
            orders.add((fixed.columns, fixed.folds, fixed.shares, fixed.by_warp))
            count += 1
        assert len(orders) <= 1
    assert count > 6 * 15


@pytest.mark.parametrize(
    ("code", "group", "rows", "stages"),
    [
        ("float8_e4m3fn", 8192, 8, 4),
        ("int8", 8192, 16, 3),
        ("int4", 128, 1, 3),
        ("int4", 128, 16, 2),
    ],
)
def test_few_rows_of_a_weight_in_few_bits_are_multiplied_by_warp_in_two_blocks_per_multiprocessor(
    code, group, rows, stages
):
    """What was fastest on an H200 (NOTES.md); more rows, and odd groups, take wgmma."""
    packing = Packing(code, group, 8192 // group, "float32", False)
    geometry = Geometry(rows, 8192, 8192, False, BFLOAT16, packing)
    assert Schedule.by_rule(geometry) == Schedule(32, 2, 2, stages, 1, 256, by_warp=True)
    assert not Schedule.by_rule(replace(geometry, rows=17)).by_warp
    odd = replace(geometry, inner=6144, packing=packing._replace(group=96, groups=64))
    schedule = Schedule.by_rule(odd)
    assert not schedule.by_warp
    assert schedule.columns >= 32


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4 by 128, zeros"])
def test_interpreted_in_the_fixed_order_few_bits_of_70_rows_have_the_bits_of_one_alone(kind, races):
    """70 rows are two groups of one launch."""
    weight = jax.tree.map(jnp.asarray, drawn(kind, (64,), 256))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(70, 256)), jnp.bfloat16)

    def run(rows):
        with fixed_order():
            return bits(multiply(weight=weight, x=x[rows], interpret=True))

    wanted = run(np.arange(70))
    for rows in ([69], [64, 3, 0]):
        assert run(np.array(rows)) == [wanted[row] for row in rows]
    assert not races()


def in_fixed_order(case, rows, *, before=False, after=False, folds=1, **options):
    """Returns the bits of each output for some rows of a case, by row, with a norm before or after the product.

    A turn has 64 numbers of a row in every form, since the interpreter adds up each turn before it adds that.
    """
    inputs = case.inputs(3)
    draw = np.random.default_rng(1)
    squares = draw.uniform(1, 2, size=(48, case.rows)).astype("float32")
    norms = draw.normal(size=(2, case.out)).astype(jnp.bfloat16)
    given = inputs | {"x": inputs["x"][rows]}
    if case.has_residual:
        given |= {"residual": inputs["residual"][rows]}
    if before:
        given |= {"squares": squares[:, rows], "norm_eps": 1e-6}
    if after:
        given |= {"next_norm": norms, "norm_row": 1}
    geometry = Geometry(min(len(rows), 64), case.out, case.inner, case.gated, BFLOAT16)
    schedule = replace(Schedule.in_fixed_order(geometry), folds=folds, depth=1, stages=2)
    with fixed_order():
        found = multiply(**device(given), schedule=schedule, interpret=True, **options)
    return [bits(found[0]), bits(found[1]), bits(found[2].T)] if after else [bits(found)]


MANY_ROWS = {
    "between norms": (
        Case("", 70, 256, 64, has_bias=True, has_residual=True, result="float32"),
        {"before": True, "after": True},
        None,
    ),
    "gates, several tiles per block, the last of fewer rows": (
        Case("", 100, 128, 64, True, "silu", 0.5, True, True, result="float32"),
        {"before": True},
        (64, 2, 2, 1, 1),
    ),
    "clusters, bands of rows": (
        Case("", 100, 128, 128, activation="relu2", result="float32"),
        {"after": True},
        (32, 1, 3, 2, 2),
    ),
    "gates before a norm, which stay groups": (
        Case("", 70, 256, 64, True, "silu", 0.5, True, True),
        {"after": True},
        None,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "clusters, bands of rows" else pytest.param(name, marks=pytest.mark.slow)
        for name in MANY_ROWS
    ],
)
def test_interpreted_in_the_fixed_order_many_rows_have_the_bits_of_few(
    name, one_by_one, races, monkeypatch
):
    """Also their norms' sums of squares, with every part of the epilogue."""
    case, norms, tiling = MANY_ROWS[name]
    monkeypatch.setattr(mosaic_tiling, "_BAND", 64)
    options = norms if tiling is None else norms | {"tiling": Tiling(*tiling)}
    wanted = in_fixed_order(case, np.arange(case.rows), **options)
    for rows in ([case.rows - 1], [64, 3, 0]):
        found = in_fixed_order(case, np.array(rows), **norms)
        assert found == [[part[row] for row in rows] for part in wanted]
    assert not races()


# Tiles of one window, with which the bits are compared, copy no residual ahead and no weight early.
@pytest.mark.parametrize("early", [pytest.param(False, marks=pytest.mark.slow), True])
def test_interpreted_a_residual_is_copied_ahead_window_by_window(
    early, one_by_one, races, monkeypatch
):
    """Tiles of more windows than are held, the last one of fewer rows, with weights copied early or not."""
    monkeypatch.setattr(mosaic_gpu, "overlaps_launches", lambda: True)
    case, tiling = Case("", 177, 64, 64, has_residual=True, result="float32"), Tiling(192, 1, 2)
    assert tiling.residual_windows < tiling.rows // 32
    with argument_weights(early):
        [found] = in_fixed_order(case, np.arange(177), tiling=tiling)
    assert found == in_fixed_order(case, np.arange(177), tiling=Tiling(32, 1, 2))[0]
    inputs = case.inputs(3)
    wanted = oracle(inputs)
    assert_output(np.frombuffer(b"".join(found), np.float32).reshape(177, 64), wanted, "bfloat16")
    assert not races()


# It shows of the test of many rows and few, above, that it can fail.
@pytest.mark.slow
def test_interpreted_many_rows_have_other_bits_than_folds_of_few(one_by_one):
    """So the comparison above finds sums in another order."""
    case, rows = Case("", 65, 512, 64, result="float32"), np.array([64, 3, 0])
    [wanted] = in_fixed_order(case, np.arange(65), tiling=Tiling(96, 1, 2))
    for folds in (1, 4):
        [found] = in_fixed_order(case, rows, folds=folds)
        assert (found == [wanted[row] for row in rows]) == (folds == 1)


FASTEST = {
    (6144, 4096, 128, None): (128, 1, 1),
    (6144, 4096, 256, None): (128, 2, 1),
    (4096, 4096, 256, None): (128, 1, 1),
    (4096, 14336, 256, None): (128, 1, 1),
    (28672, 4096, 128, None): (128, 2, 2),
    (4096, 1024, 256, None): (128, 1, 1),
    (6144, 4096, 256, "int4"): (128, 2, 1),
    (4096, 14336, 512, "float8_e4m3fn"): (128, 2, 1),
    (6144, 4096, 512, "int4"): (128, 2, 1),
    (6144, 4096, 512, "float8_e4m3fn"): (128, 2, 1),
    (6144, 4096, 2048, "int4"): (160, 2, 1),
    (4096, 4096, 1024, "float8_e4m3fn"): (128, 2, 1),
}
"""Columns, contraction, rows, code -> rows, consumers and cluster of the fastest tiling that was timed on an H200."""


@pytest.mark.parametrize(("sizes", "fastest"), FASTEST.items(), ids=str)
def test_many_rows_have_the_tiling_that_was_fastest(sizes, fastest):
    out, inner, rows, code = sizes
    group = 128 if code == "int4" else inner
    packing = None if code is None else Packing(code, group, inner // group, "float32", False)
    tiling = Tiling.by_rule(Geometry(64, out, inner, False, BFLOAT16, packing), rows)
    assert (tiling.rows, tiling.consumers, tiling.cluster) == fastest


def test_codes_that_are_widened_are_widened_for_many_rows_at_once():
    """Twice as many rows per tile halve the widening, and cost the tensor cores as much."""
    packing = Packing("int4", 128, 32, "bfloat16", False)
    packed = Geometry(64, 6144, 4096, False, BFLOAT16, packing)
    small, large = Tiling(64, 2, 8), Tiling(128, 2, 8)
    assert large.clocks(packed, 512) < 0.9 * small.clocks(packed, 512)
    as_they_lie = replace(packed, rounds_rows=True)
    assert small.clocks(as_they_lie, 512) < small.clocks(packed, 512)


@pytest.mark.parametrize("rows", [65, 300, 512, 2048, 8192])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_number_of_rows_has_a_tiling(case, rows):
    """Tiles cover all rows and columns, and with many of them few SMs are idle."""
    geometry = Geometry(64, case.out, case.inner, case.gated, BFLOAT16)
    if geometry.refusal() is not None:
        pytest.skip("the kernel does not take it")
    tiling = Tiling.by_rule(geometry, rows)
    assert tiling.refusal(geometry) is None
    assert tiling.row_tiles(rows) * tiling.rows >= rows
    assert tiling.column_tiles(geometry) * tiling.columns(geometry) >= case.out
    assert tiling.grid(geometry, rows) * tiling.cluster <= 132
    if rows >= 2048 and not case.ci:
        tiles, grid = tiling.tiles(geometry, rows), tiling.grid(geometry, rows)
        assert grid * tiling.cluster >= 120
        assert tiles / (-(-tiles // grid) * grid) > 0.85


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 40}, "multiple of 32 rows up to 256"),
        ({"rows": 288}, "multiple of 32 rows up to 256"),
        ({"consumers": 3}, "1 to 2 consumers"),
        ({"cluster": 4}, "1 to 2 blocks"),
        ({"consumers": 2, "cluster": 2}, "wider than the result, 128"),
        ({"stages": 1}, "at least two stages"),
        ({"blocks": 1, "cluster": 2}, "one cluster"),
        ({"stages": 14}, "bytes of shared memory"),
    ],
)
def test_tilings_that_cannot_run_are_refused(change, message):
    geometry = Geometry(64, 128, 4096, False, BFLOAT16)
    tiling = Tiling(64, 1, 2)
    assert tiling.refusal(geometry) is None
    assert message in (replace(tiling, **change).refusal(geometry) or "")


def test_schedules_depend_on_static_shapes_alone_and_cover_every_row_count():
    """Rows that are padded to the same width share a schedule."""
    geometry = Geometry(1, 4096, 4096, False, BFLOAT16)
    schedules = {Schedule.of(replace(geometry, rows=rows)) for rows in range(1, 9)}
    assert len(schedules) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": 24}, "power of two"),
        ({"columns": 8}, "multiple of 64 rows"),
        ({"columns": 8192, "folds": 1}, "wider than the result"),
        ({"folds": 3}, "multiple of 64 rows"),
        ({"depth": 48}, "is not a multiple of"),
        ({"stages": 99}, "bytes of shared memory"),
        ({"stages": 1}, "need two slots"),
        ({"splits": 0}, "at least 1"),
        ({"columns": 512, "folds": 1}, "registers"),
        ({"cluster": 2}, "no folds"),
        ({"cluster": 4, "folds": 1, "columns": 64}, "at most 2"),
        ({"cluster": 2, "folds": 1, "columns": 64, "blocks": 32}, "needs one tile per block"),
        ({"cluster": 2, "folds": 1, "columns": 64, "splits": 2}, "no splits"),
        ({"cluster": 2, "folds": 1, "columns": 64, "passes": 2}, "one pass"),
        ({"passes": 2}, "no folds"),
        ({"cluster": 2, "folds": 1}, "at least 64 rows"),
    ],
)
def test_schedules_that_cannot_run_are_refused(change, message):
    geometry = Geometry(64, 4096, 4096, False, BFLOAT16)
    schedule = replace(Schedule(32, 2, 1, 2, 1, 999), **change)
    assert message in (schedule.refusal(geometry) or "")


@pytest.mark.parametrize(
    ("change", "group", "message"),
    [
        ({}, None, "only a weight in few bits"),
        ({"columns": 8, "folds": 8}, 128, "16 rows of one fold"),
        ({}, 96, "256 columns does not fit groups of 96"),
        ({"depth": 3}, 128, "768 columns does not fit"),
        ({"columns": 64, "folds": 12}, 128, "registers"),
    ],
)
def test_schedules_that_cannot_run_by_warp_are_refused(change, group, message):
    packing = Packing("int4", 128, 48, "float32", False)
    geometry = Geometry(16, 4096, 6144, False, BFLOAT16, packing)
    schedule = Schedule(32, 2, 1, 2, 1, 999, by_warp=True)
    assert schedule.refusal(geometry) is None
    changed = None if group is None else packing._replace(group=group, groups=6144 // group)
    geometry = replace(geometry, packing=changed)
    assert message in (replace(schedule, **change).refusal(geometry) or "")

"""The Mosaic GPU kernel of `grouped_matmul` itself: interpreted, and how it cuts the work. Contract: its own suite."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.device import NEWEST_JAX, ROW_TILE, SHARED_BYTES_PER_BLOCK
from pallas_kernels.fixed_order import fixed_order
from pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_visits
from pallas_kernels.grouped_matmul.cases import CASES, Case
from pallas_kernels.grouped_matmul.mosaic_schedule import Geometry, Schedule
from pallas_kernels.grouped_matmul.mosaic_visits import COUNT, FIRST, GROUP, HIGH, LOW, table
from pallas_kernels.mosaic.few_bits_turn import Packing
from tests.fast_cases import fast_cases
from tests.pallas_kernels.contract import bits, device
from tests.pallas_kernels.few_bits import drawn, exact
from tests.pallas_kernels.grouped_matmul.test_grouped_matmul import oracle
from tests.pallas_kernels.mosaic.numpy_threads import NumpyThreads, Race, without_barrier
from tests.tolerances import assert_output

pytestmark = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="the kernels refuse this JAX; why_not says so"
)
BFLOAT16 = jnp.dtype(jnp.bfloat16)

# Every way of cutting: window, columns, what is on the left, chunk, stages, blocks.
CUTS = {
    "several pairs per block, empty groups, groups over several windows": (
        Case("", (3, 0, 1, 5, 20, 0), 256, 128),
        (16, 64, "weight", 128, 3, 3),
    ),
    "two consumers of the weight, strided matrices": (
        Case("", (9, 0, 8, 7), 128, 128, group_axis=1, result="float32"),
        (16, 128, "weight", 64, 2, 9),
    ),
    # One block: what two tiles store, one after the other, is a race between blocks, of equal bits.
    "rows on the left, strided matrices, the last tile early": (
        Case("", (100, 0, 0, 27, 3), 128, 200, group_axis=1),
        (128, 128, "rows", 64, 2, 1),
    ),
    "one consumer of rows, and fewer rows than a window": (
        Case("", (5, 0, 12), 64, 64, result="float32"),
        (64, 64, "rows", 64, 2, 9),
    ),
    "one row, the last tile early": (
        Case("", (0, 0, 0, 1), 64, 72),
        (16, 64, "weight", 64, 2, 1),
    ),
}


def interpreted(inputs, cuts):
    return mosaic_gpu.grouped_matmul(**device(inputs), schedule=Schedule(*cuts), interpret=True)


# Several windows, two consumers, a last tile that is early, and rows on the left; the others are parts of these.
FAST_CUTS = [name for name in CUTS if not name.startswith("one ")]


@pytest.mark.parametrize("name", fast_cases(CUTS, *FAST_CUTS))
def test_interpreted_it_equals_the_oracle_without_a_race(name, races):
    case, cuts = CUTS[name]
    inputs = case.inputs(1)
    result = interpreted(inputs, cuts)
    assert result.dtype == jnp.dtype(case.result or "bfloat16")
    assert_output(result, oracle(inputs), "bfloat16")
    assert not races()


FEW_BITS = {
    "mxfp4": (Case("", (3, 0, 20, 1), 320, 192), (16, 192, "weight", 64, 2, 3)),
    "mxfp4 in a wide window": (
        Case("", (3, 0, 130, 1), 128, 128),
        (128, 128, "weight", 64, 2, 3),
    ),
    "int4 by 128, zeros": (Case("", (1, 0, 2), 512, 72, 1), (16, 64, "weight", 256, 2, 1)),
    "e4m3 by 128": (Case("", (1, 0, 0, 9), 256, 64), (32, 64, "weight", 128, 2, 9)),
}


@pytest.mark.parametrize(
    "name",
    [
        "mxfp4",
        "mxfp4 in a wide window",
        "int4 by 128, zeros",
        pytest.param("e4m3 by 128", marks=pytest.mark.slow),
    ],
)
def test_interpreted_weights_in_few_bits_are_exact(name, races):
    """With hostile scales: each expert has its own, on either axis."""
    case, cuts = FEW_BITS[name]
    kind = name.removesuffix(" in a wide window")
    inputs = case.inputs(1) | {"result": "float32"}
    weight = drawn(kind, case.weight_shape[:2], case.inner, hostile=True)
    found = interpreted(inputs | {"weight": weight}, cuts)
    exactly = exact(weight)
    wanted = oracle(inputs | {"weight": exactly})
    most = oracle(inputs | {"weight": np.abs(exactly), "x": np.abs(inputs["x"].astype(np.float64))})
    assert np.all(np.abs(np.asarray(found, np.float64) - wanted) <= 1e-6 * most)
    assert not races()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_weight_in_few_bits_has_a_schedule_with_stages_to_fill(case):
    """The weight is on the left for every number of rows."""
    for code, group in (("float8_e4m3fn", 64), ("int4", 32), ("float4_e2m1fn", 32)):
        packing = Packing(code, group, case.inner // group, "float8_e8m0fnu", False)
        geometry = Geometry(
            case.rows,
            case.groups,
            case.out,
            case.inner,
            case.group_axis,
            BFLOAT16,
            BFLOAT16,
            packing,
        )
        if geometry.refusal() is not None:
            pytest.skip("the kernel does not take it")
        schedule = Schedule.by_rule(geometry)
        assert schedule.refusal(geometry) is None
        assert schedule.left == "weight"
        assert schedule.stages >= 3
        # A third consumer has the registers that it needs only where scales multiply the numbers.
        consumers = 2 if code == "float8_e4m3fn" or schedule.window > 64 else 3
        assert schedule.columns == min(consumers * 64, case.out // 64 * 64)


def test_interpreted_no_row_is_stored_over_a_neighbour(races):
    """Rows beside NaN keep their bits, and a group whose weights are NaN changes its own rows alone."""
    case = Case("", (3, 6, 0, 7, 2), 64, 64)
    cuts = (16, 64, "weight", 64, 2, 2)
    inputs = case.inputs(2)
    first = bits(interpreted(inputs, cuts))
    groups = np.repeat(np.arange(case.groups), case.sizes)
    broken = inputs["weight"].copy()
    broken[1::2] = np.nan
    spoilt = np.asarray(interpreted(inputs | {"weight": broken}, cuts), np.float32)
    assert np.isnan(spoilt).all(axis=1).tolist() == (groups % 2 == 1).tolist()
    poisoned = inputs["x"].copy()
    poisoned[::2] = np.nan
    assert bits(interpreted(inputs | {"x": poisoned}, cuts))[1::2] == first[1::2]
    assert not races()


def test_interpreted_a_window_changes_no_bit(one_by_one, races):
    """With the weight on the left, also at 128 rows, which only the fixed order has there."""
    inputs = Case("", (100, 0, 3, 27), 128, 128, result="float32").inputs(3)
    narrow, wide = (
        bits(interpreted(inputs, (window, columns, "weight", 64, 2, 9)))
        for window, columns in ((16, 64), (128, 128))
    )
    assert narrow == wide
    assert not races()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_the_fixed_order_the_weight_is_on_the_left_of_any_number_of_rows(case):
    """And a turn over a weight in few bits is the same for all."""
    packing = Packing("float4_e2m1fn", 32, case.inner // 32, "float8_e8m0fnu", False)
    for form in (None, packing):
        chunks = set()
        for rows in (1, case.groups, 30 * case.groups, 500 * case.groups):
            sizes = (rows, case.groups, case.out, case.inner, case.group_axis)
            geometry = Geometry(*sizes, BFLOAT16, BFLOAT16, form)
            if geometry.refusal() is not None:
                pytest.skip("the kernel does not take it")
            with fixed_order():
                schedule = Schedule.by_rule(geometry)
            assert schedule.refusal(geometry) is None
            assert schedule.left == "weight"
            chunks.add(schedule.chunk)
        assert form is None or len(chunks) == 1


VISITED = [(rows, window) for rows in (5, 96) for window in (8, 16, 64)]


def listed(sizes, geometry, schedule, threads=NumpyThreads):
    """Returns the table of visits, made by the kernel's code in NumPy; what it does not write is negative."""
    visits = schedule.visits(geometry)
    facts = np.full(5 * visits, -1, np.int32)
    mosaic_visits._list_visits(
        threads(),
        sizes,
        facts,
        np.zeros(4, np.int32),
        groups=len(sizes),
        visits=visits,
        window=schedule.window,
        last_start=schedule.padded_rows(geometry) - schedule.window,
    )
    return facts.reshape(5, visits)


@given(what=st.sampled_from(VISITED), groups=st.sampled_from((1, 8, 300)), data=st.data())
def test_visits_cover_each_row_once_and_fit_what_was_launched_for(what, groups, data):
    rows, window = what
    geometry = Geometry(rows, groups, 64, 64, 0, BFLOAT16, BFLOAT16)
    schedule = Schedule(window, 64, "weight", 64, 2, 1)
    starts = data.draw(st.lists(st.integers(0, groups - 1), min_size=rows, max_size=rows))
    sizes = np.bincount(starts, minlength=groups).astype(np.int32)
    visits = listed(sizes, geometry, schedule)
    count = visits[COUNT, 0]
    assert count <= schedule.visits(geometry) == visits.shape[1]
    wanted = np.repeat(np.arange(groups), sizes)
    found = []
    for group, first, low, high in visits[[GROUP, FIRST, LOW, HIGH], :count].T:
        assert first % ROW_TILE == 0
        assert first <= low < high <= first + schedule.window
        assert first + schedule.window <= schedule.padded_rows(geometry)
        assert (wanted[low:high] == group).all()
        found += range(low, high)
    assert found == list(range(geometry.rows))


@pytest.mark.parametrize("left_out", range(3))
def test_a_barrier_that_is_left_out_of_the_list_of_visits_is_a_race(left_out):
    """All but the last one, which frees the table of sums for a third."""
    geometry = Geometry(96, 300, 64, 64, 0, BFLOAT16, BFLOAT16)
    schedule = Schedule(16, 64, "weight", 64, 2, 1)
    sizes = np.zeros(300, np.int32)
    sizes[[3, 150, 290]] = 40, 50, 6
    with pytest.raises(Race):
        listed(sizes, geometry, schedule, without_barrier(left_out))


def test_interpreted_the_visits_are_those_of_the_code_in_numpy(races):
    geometry = Geometry(96, 8, 64, 64, 0, BFLOAT16, BFLOAT16)
    schedule = Schedule(16, 64, "weight", 64, 2, 1)
    sizes = np.asarray([0, 3, 40, 0, 1, 50, 2, 0], np.int32)
    found = np.asarray(table(jnp.asarray(sizes), geometry, schedule, interpret=True))
    wanted = listed(sizes, geometry, schedule)
    count = wanted[COUNT, 0]
    assert found[COUNT, 0] == count
    np.testing.assert_array_equal(found[:COUNT, :count], wanted[:COUNT, :count])
    assert not races()


def test_a_group_of_few_rows_is_visited_once():
    """So that its weights are fetched once: the rule makes windows wide enough for twice a group's share."""
    for rows, groups in ((80, 512), (64, 32), (640, 512), (1024, 32)):
        geometry = Geometry(rows, groups, 1024, 2048, 0, BFLOAT16, BFLOAT16)
        schedule = Schedule.by_rule(geometry)
        share = rows // groups
        if schedule.window < 128:
            assert schedule.window >= 2 * share + ROW_TILE - 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_rules_fit_every_case(case):
    geometry = Geometry(
        case.rows, case.groups, case.out, case.inner, case.group_axis, BFLOAT16, BFLOAT16
    )
    if geometry.refusal() is not None:
        pytest.skip("the kernel does not take it")
    for result in (BFLOAT16, jnp.dtype(jnp.float32)):
        schedule = Schedule.by_rule(replace(geometry, result=result))
        assert schedule.refusal(replace(geometry, result=result)) is None
        assert schedule.shared_bytes(replace(geometry, result=result)) <= SHARED_BYTES_PER_BLOCK
        # Enough is in flight on a multiprocessor for the memory never to wait.
        resident = schedule.blocks // 132
        assert resident * (schedule.stages - 1) * schedule.slot_bytes(geometry) >= 80 * 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left": "x"}, "left must be one of weight, rows"),
        ({"stages": 1}, "two stages"),
        ({"window": 24}, "power of two"),
        ({"columns": 32}, "a multiple of 64 rows, at most 128, got 32"),
        ({"window": 512}, "up to 256"),
        ({"left": "rows", "window": 64, "columns": 72}, "multiple of 64"),
        ({"columns": 128}, "wider than the result"),
        ({"chunk": 96}, "is not a multiple of"),
        ({"stages": 99}, "bytes of shared memory"),
    ],
)
def test_schedules_that_cannot_run_are_refused(change, message):
    geometry = Geometry(64, 8, 120, 4096, 0, BFLOAT16, BFLOAT16)
    schedule = replace(Schedule(16, 64, "weight", 128, 2, 264), **change)
    assert message in (schedule.refusal(geometry) or "")

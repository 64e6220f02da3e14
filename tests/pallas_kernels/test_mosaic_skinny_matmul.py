"""The Mosaic GPU kernel of `skinny_matmul` itself: interpreted, and how it cuts weights. Contract: its own suite."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

from pallas_kernels.device import NEWEST_JAX, SHARED_BYTES_PER_BLOCK
from pallas_kernels.skinny_matmul import mosaic_gpu
from pallas_kernels.skinny_matmul.cases import CASES, Case
from pallas_kernels.skinny_matmul.mosaic_ahead import Ahead
from pallas_kernels.skinny_matmul.mosaic_schedule import Geometry, Schedule
from tests.pallas_kernels.contract import bits
from tests.pallas_kernels.test_skinny_matmul import oracle, packed
from tests.tolerances import assert_output

pytestmark = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="this JAX takes minutes; why_not says so"
)
mosaic_ahead = import_module("pallas_kernels.skinny_matmul.mosaic_ahead")
BFLOAT16 = jnp.dtype(jnp.bfloat16)

# Every way of cutting, alone and with others: columns, folds, depth, stages, splits, blocks.
CUTS = {
    "one tile per block": (Case("", 3, 256, 128), (64, 1, 1, 3, 1, 9)),
    "tiles in turn, the last one early": (
        Case("", 9, 256, 200, has_bias=True),
        (64, 1, 1, 3, 1, 2),
    ),
    "folds": (Case("", 5, 512, 64, has_residual=True), (16, 4, 1, 2, 1, 9)),
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
}


@pytest.fixture
def races():
    """Tells whether the interpreter saw a race, and leaves it as it was found."""
    yield lambda: interpreter.get_races().races_found
    interpreter.reset_gpu_interpret_mode_state()


def device(inputs):
    return {n: jnp.asarray(v) if isinstance(v, np.ndarray) else v for n, v in inputs.items()}


@pytest.mark.parametrize("name", CUTS)
def test_interpreted_it_equals_the_oracle_without_a_race(name, races):
    case, cuts = CUTS[name]
    inputs = case.inputs(1)
    result = mosaic_gpu.skinny_matmul(**device(inputs), schedule=Schedule(*cuts), interpret=True)
    assert result.dtype == jnp.dtype(case.result or "bfloat16")
    assert_output(result, oracle(inputs), "bfloat16")
    assert not races()


@pytest.mark.parametrize("name", ["tiles in turn, the last one early", "splits", "two heights"])
def test_interpreted_what_is_asked_for_ahead_changes_no_bit(name, races):
    """With copies left to send for while others are multiplied, and with none."""
    case, cuts = CUTS[name]
    inputs = device(case.inputs(1))
    run = partial(mosaic_gpu.skinny_matmul, **inputs, schedule=Schedule(*cuts), interpret=True)
    ahead = jnp.full((1024, 512), jnp.nan, jnp.bfloat16)
    assert bits(run(ahead=ahead, ahead_gated=True)) == bits(run())
    assert not races()


@pytest.mark.parametrize("blocks", [1, 5, 32, 200])
@pytest.mark.parametrize("cuts", [(16, 2, 1, 3, 1, 9), (32, 1, 2, 4, 2, 99), (64, 1, 1, 2, 1, 2)])
@pytest.mark.parametrize("gated", [False, True])
def test_exactly_what_the_next_product_fetches_first_is_asked_for(cuts, blocks, gated, monkeypatch):
    """Each of its blocks begins with the first chunks of its first tile; no piece is asked for twice."""
    weight = np.zeros((2 * 200 if gated else 200, 512))
    asked = np.zeros_like(weight)
    monkeypatch.setattr(Schedule, "of", lambda _: Schedule(*cuts))
    monkeypatch.setattr(mosaic_ahead, "AHEAD_BYTES", 2**20)
    ahead = Ahead.of(jnp.asarray(weight, jnp.bfloat16), 3, jnp.bfloat16, gated=gated)
    schedule, geometry = ahead.schedule, ahead.geometry

    class Pool:
        at = property(lambda self: self)

        def __getitem__(self, place):
            return tuple(np.s_[int(part.start) : int(part.start) + part.size] for part in place)

    def prefetch(place, predicate):
        asked[place] += predicate is None or bool(predicate)

    monkeypatch.setattr(mosaic_ahead.plgpu, "async_prefetch", prefetch)
    for block in range(blocks):
        ahead.ask(Pool(), jnp.int32(block), blocks)
    wanted = np.zeros_like(weight)
    turn = schedule.folds * schedule.chunk(geometry)
    share = 512 // schedule.splits
    for tile in range(0, schedule.tiles(geometry), schedule.tiles_per_block(geometry)):
        for split in range(schedule.splits):
            for half in range(2 if gated else 1):
                first = 200 * half + min(tile * schedule.columns, 200 - schedule.columns)
                inner = np.s_[split * share : split * share + min(ahead.turns * turn, share)]
                wanted[first : first + schedule.columns, inner] += 1
    assert ahead.turns > 1
    assert ahead.turns * turn <= share
    np.testing.assert_array_equal(asked, wanted)


def test_nothing_is_asked_for_a_product_that_is_not_this_kernels():
    """Sizes that are XLA's; and a weight whose first turns are more than may be asked for."""
    assert Ahead.of(jnp.zeros((128, 60), jnp.bfloat16), 1, jnp.bfloat16, gated=False) is None
    assert Ahead.of(jnp.zeros((128, 64), jnp.bfloat16), 65, jnp.bfloat16, gated=False) is None


def test_interpreted_rows_do_not_see_each_other():
    """S5-41: equal bits for permuted rows, and for a row beside NaN, whatever is stacked with it."""
    case, cuts = CUTS["folds"]
    inputs = case.inputs(2)
    order = np.array([4, 2, 0, 3, 1])
    poisoned = inputs["x"].copy()
    poisoned[1::2] = np.nan

    def run(**change):
        given = device(inputs | change)
        return bits(mosaic_gpu.skinny_matmul(**given, schedule=Schedule(*cuts), interpret=True))

    first = run()
    assert run(x=inputs["x"][order], residual=inputs["residual"][order]) == [
        first[row] for row in order
    ]
    assert run(x=poisoned)[::2] == first[::2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_rules_fit_every_case_into_one_wave(case):
    """All blocks of a real shape are at work at once, and each of them does as much as the others."""
    geometry = Geometry(case.rows, case.out, case.inner, case.gated, BFLOAT16, BFLOAT16)
    if geometry.refusal() is not None or not case.rows:
        pytest.skip("the kernel does not take it")
    schedule = Schedule.by_rule(geometry)
    assert schedule.refusal(geometry) is None
    assert schedule.shared_bytes(geometry) <= SHARED_BYTES_PER_BLOCK
    blocks = schedule.grid(geometry) * schedule.splits
    assert blocks <= 132 * schedule.resident(geometry)
    if not case.ci:
        assert blocks >= 96
        done = schedule.grid(geometry) * schedule.tiles_per_block(geometry)
        assert done <= 1.05 * schedule.tiles(geometry)


@pytest.mark.parametrize("cuts", [(32, 2, 1, 3, 1, 9), (64, 1, 1, 3, 1, 1), (64, 1, 1, 2, 2, 9)])
def test_interpreted_a_norm_is_left_to_the_product_after_it(cuts, races):
    """Tiles alone and in turn, and splits: the squares are those of the rows as they were rounded."""
    case = Case("", 5, 256, 128)
    inputs = case.inputs(3)
    squares = np.linspace(0.1, 0.9, 6 * 5, dtype=np.float32).reshape(6, 5) * 256
    norm = np.linspace(0.5, 2, 128).astype(inputs["x"].dtype)
    given = inputs | {"squares": squares, "norm_eps": 0.5, "next_norm": norm[None]}
    result, weighed, found = mosaic_gpu.skinny_matmul(
        **device(given), schedule=Schedule(*cuts), interpret=True
    )
    root = np.sqrt(squares.astype(np.float64).sum(axis=0) / 256 + 0.5)
    assert_output(result, oracle(inputs) / root[:, None], "bfloat16")
    wide = np.asarray(result, np.float64)
    assert_output(weighed, wide * norm.astype(np.float64), "bfloat16")
    np.testing.assert_allclose(np.sum(found, axis=0), np.sum(wide**2, axis=1), rtol=2e-3)
    assert not races()


@pytest.mark.parametrize(
    ("stored", "rows", "cuts"),
    [
        ("int8", 3, (64, 1, 1, 2, 1, 9)),
        ("float8_e4m3fn", 9, (32, 2, 2, 2, 1, 9)),
        ("float8_e4m3fn", 17, (64, 1, 1, 3, 2, 1)),
    ],
)
def test_interpreted_weights_of_8_bits_equal_the_oracle(stored, rows, cuts, races):
    """Rows may be anything that their dtype holds: products are of float16."""
    inputs = packed(Case("", rows, 512, 128, has_bias=True, has_residual=True), stored)
    inputs["x"] *= np.linspace(-5, 5, rows, dtype=np.float32)[:, None].astype(inputs["x"].dtype)
    inputs["x"][0] = inputs["x"][0] * inputs["x"].dtype.type(2.0**30)
    inputs["scales"] *= np.float32(2.0**-5)
    result = mosaic_gpu.skinny_matmul(**device(inputs), schedule=Schedule(*cuts), interpret=True)
    assert_output(result, oracle(inputs), "bfloat16")
    assert not races()


def test_schedules_depend_on_static_shapes_alone_and_cover_every_row_count():
    """S1-06: rows that are padded to the same width share a schedule."""
    geometry = Geometry(1, 4096, 4096, False, BFLOAT16, BFLOAT16)
    schedules = {Schedule.of(replace(geometry, rows=rows)) for rows in range(1, 9)}
    assert len(schedules) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": 24}, "power of two"),
        ({"columns": 8}, "multiple of 64 rows"),
        ({"columns": 8192, "folds": 1}, "wider than the result"),
        ({"folds": 3}, "multiple of 64 rows"),
        ({"depth": 48}, "cannot be cut"),
        ({"stages": 99}, "bytes of shared memory"),
        ({"splits": 0}, "at least 1"),
        ({"columns": 512, "folds": 1}, "registers"),
    ],
)
def test_schedules_that_cannot_run_are_refused(change, message):
    geometry = Geometry(64, 4096, 4096, False, BFLOAT16, BFLOAT16)
    schedule = replace(Schedule(32, 2, 1, 2, 1, 999), **change)
    assert message in (schedule.refusal(geometry) or "")

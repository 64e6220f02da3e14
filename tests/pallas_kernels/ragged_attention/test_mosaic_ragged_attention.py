"""The Mosaic GPU kernel of `ragged_attention` itself: interpreted, compiled without a GPU, hostile cases on one.

What it shares with other implementations is tested in test_ragged_attention.py, and what becomes of it on an H200 in
h200/test_kernels.py.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_attention, tuning
from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.device import NEWEST_JAX, SHARED_BYTES_PER_BLOCK, gpu_arch
from pallas_kernels.mosaic.jax_versions import honours_register_requests
from pallas_kernels.ragged_attention import mosaic_gpu
from pallas_kernels.ragged_attention.cases import Case
from pallas_kernels.ragged_attention.mosaic_schedule import (
    ONE_BLOCK_EACH,
    Geometry,
    Schedule,
    most_tiles,
    shape_class,
)
from pallas_kernels.ragged_attention.mosaic_tiles import Tile, cut
from pallas_kernels.workbench.search_space import prefill_candidates
from tests.pallas_kernels import oracle
from tests.pallas_kernels.contract import bits
from tests.tolerances import assert_lse, assert_output

ARRAYS = AttentionArrays._fields
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 64}
FEW = Schedule(64, 2, 1, 2)


def attend(case, schedule, inputs, *, interpret=False):
    """Runs the kernel under a schedule of our choice."""
    arrays = AttentionArrays(*(inputs.get(name) for name in ARRAYS))
    return mosaic_gpu.attend(
        jax.tree.map(jnp.asarray, arrays),
        options=ScoreOptions(scale=inputs["scale"], window=case.window, soft_cap=case.soft_cap),
        schedule=schedule,
        want_lse=True,
        interpret=interpret,
    )


def hide_unseen_pages(case, inputs):
    """Page ids that hold no key to see may be any number: given away before a window, never the row's own behind it."""
    for row, (queries, keys) in enumerate(case.rows):
        table = inputs["page_table"][row]
        table[-(-keys // case.page_size) if queries else 0 :] = 2**30 + row
        if queries and case.window is not None:
            table[: max(0, keys - queries + 1 - case.window) // case.page_size] = 2**30


def assert_is_oracle(result, inputs, dtype):
    inputs = {**inputs, "page_table": inputs["page_table"] % len(inputs["k_pages"])}
    wanted_out, wanted_lse = oracle.ragged_attention(**inputs)
    assert_output(result[0], wanted_out, dtype)
    assert_lse(result[1], wanted_lse)


INTERPRETED = {
    "decode, a chunk of more tiles than stages, an idle row and padding in pieces that follow one another": (
        Case("", ((20, 300), (1, 40), (0, 9), (9, 9)), 5, **SMALL, page_size=16),
        FEW,
    ),
    "a window that starts inside a page, sinks, a block for each piece": (
        Case("", ((9, 200), (1, 61)), **SMALL, page_size=64, window=70, sinks=True),
        Schedule(128, 2, 2, ONE_BLOCK_EACH),
    ),
    "fp8 in pages of one and a half tiles, one key head, a cap": (
        Case("", ((20, 140), (3, 130)), 3, heads=3, kv_heads=1, head_dim=64, page_size=192, soft_cap=5.0,
             quantised="float8_e4m3fn"),
        Schedule(128, 2, 2, 2),
    ),
}  # fmt: skip


FIRST, SECOND, THIRD = INTERPRETED


# Of pages of 8 bits, the same kernel reads what XLA has unpacked.
@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        pytest.param(*given, id=name, marks=[pytest.mark.slow] * (name == THIRD))
        for name, given in INTERPRETED.items()
    ],
)
def test_interpreted_it_equals_the_oracle_without_a_race(case, schedule, races):
    """Places that must not be read hold NaN, and a read out of bounds raises."""
    inputs = case.inputs(1)
    hide_unseen_pages(case, inputs)
    assert_is_oracle(attend(case, schedule, inputs, interpret=True), inputs, "bfloat16")
    assert not races()


# What differs is who copies. JAX 0.12 runs the kernels of the test above this way.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(FIRST, marks=[pytest.mark.slow] * (not honours_register_requests())),
        pytest.param(SECOND, marks=pytest.mark.slow),
    ],
)
def test_interpreted_it_equals_the_oracle_without_a_producer(name, no_requests, races):
    test_interpreted_it_equals_the_oracle_without_a_race(*INTERPRETED[name], races)


# The door is that of XLA's attention too, for which test_ragged_attention.py asks the same.
@pytest.mark.slow
def test_interpreted_a_window_wider_than_any_row_hides_nothing(monkeypatch, races):
    """Its door takes it for none: past 32 bits the kernel's own bounds would wrap around."""
    interpreted = partial(mosaic_gpu.ragged_attention, interpret=True)
    monkeypatch.setattr(mosaic_gpu, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(mosaic_gpu, "ragged_attention", interpreted)
    inputs = Case("", ((9, 40), (1, 33)), **SMALL).inputs(1)
    given = inputs | {"window": 2**31 - 1, "implementation": "mosaic_gpu", "return_lse": True}
    assert_is_oracle(ragged_attention(**given), inputs, "bfloat16")
    assert not races()


# h200/test_kernels.py compiles the kernel for an H200.
@pytest.mark.slow
def test_it_lowers_for_cuda_without_a_gpu():
    """Layouts are inferred and shared memory is counted here, so neither can fail on a GPU first."""
    if jax.__version_info__[:2] > NEWEST_JAX:
        pytest.skip("the kernels refuse this JAX; why_not says so")
    shapes = [(33, 16, 128), (9, 48, 1, 128), (9, 48, 1, 128), (2, 4), (2,), (3,)]
    dtypes = [jnp.float16] * 3 + [jnp.int32] * 3
    arguments = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes, strict=True)]

    def run(*arrays):
        return mosaic_gpu.ragged_attention(AttentionArrays(*arrays), ScoreOptions(1.0))

    lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def geometries():
    for heads, kv_heads in ((1, 1), (14, 2), (28, 4), (32, 8), (40, 8), (64, 8), (32, 1), (8, 8)):
        for head_dim in (64, 128, 192, 256):
            for page_size in (8, 16, 64, 128, 1152):
                yield Geometry(heads, kv_heads, head_dim, page_size, jnp.bfloat16)


@pytest.mark.parametrize("window", [None, 128])
def test_every_schedule_fits_in_shared_memory(window):
    for geometry in geometries():
        assert geometry.refusal() is None
        schedule = Schedule.of(geometry, 2048, 8, window)
        found = prefill_candidates(geometry, 2048, 8, window)
        assert found[0] == schedule
        assert len(found) == len(set(found))
        for schedule in found:
            assert geometry.shared_bytes(schedule) <= SHARED_BYTES_PER_BLOCK, schedule
            assert schedule.is_possible(geometry, window)


def test_a_tuned_schedule_is_taken_only_if_the_kernel_can_run_under_it(monkeypatch):
    llama = Geometry(32, 8, 128, 16, jnp.bfloat16)
    monkeypatch.setattr(tuning, "tuned", lambda *_: fields)
    fields = {"keys": 64, "stages": 3, "query_slots": 1, "blocks": 66}
    assert Schedule.of(llama, 8192, 8, None) == Schedule(64, 3, 1, 66)
    rule = Schedule.by_rule(llama, None)
    for changes in (
        {"keys": 96},
        {"stages": 1},
        {"stages": 40},
        {"query_slots": 0},
        {"query_slots": -1},
        {"blocks": 0},
        {"blocks": -1},
    ):
        fields = {"keys": 64, "stages": 3, "query_slots": 1, "blocks": 66} | changes
        assert Schedule.of(llama, 8192, 8, None) == rule, changes
    for fields in (None, {"keys": 64, "stages": 3, "query_slots": 1}):  # noqa: B007 - `tuned` reads it
        assert Schedule.of(llama, 8192, 8, None) == rule


def test_shapes_of_one_class_share_a_tuned_schedule():
    llama = Geometry(32, 8, 128, 16, jnp.bfloat16)
    assert shape_class(llama, 8192, 1, None) == shape_class(llama, 5000, 1, None)
    assert shape_class(llama, 8192, 1, None) != shape_class(llama, 8192, 8, None)
    assert shape_class(llama, 8192, 1, None) != shape_class(llama, 8192, 1, 1024)


def cut_rows(rows, padding, *, tokens_per_tile=32, keys=128, window=None):
    """Returns the tiles that exist, as rows of numbers, in the order of work."""
    bounds = np.cumsum([0, *(queries for queries, _ in rows)]).astype(np.int32)
    tokens = int(bounds[-1]) + padding
    sizes = {"tokens": tokens, "tokens_per_tile": tokens_per_tile, "keys": keys, "window": window}
    num_tiles = most_tiles(tokens, len(rows), tokens_per_tile)
    tiles, count = jax.jit(partial(cut, num_tiles=num_tiles, **sizes))(
        jnp.array([keys for _, keys in rows], jnp.int32), jnp.asarray(bounds)
    )
    assert int(count[0]) <= len(tiles)
    return [Tile(*map(int, tile)) for tile in np.asarray(tiles)[: int(count[0])]]


@pytest.mark.parametrize("seed", range(4))
def test_tiles_cover_every_token_once_and_know_where_it_is(seed):
    rng = np.random.default_rng(seed)
    queries = rng.integers(0, 70, 6) * rng.integers(0, 2, 6)
    rows = [(int(count), int(count + rng.integers(0, 900))) for count in queries]
    padding = int(rng.integers(0, 40)) + (not queries.any())
    bounds = np.cumsum([0, *(count for count, _ in rows)])
    seen = []
    for tile in cut_rows(rows, padding):
        assert tile.token % 8 == 0
        assert tile.token <= tile.start < tile.stop <= tile.token + 32
        seen += range(tile.start, tile.stop)
        if tile.start >= bounds[-1]:
            assert tile.seq_len == 0
            assert tile.position + tile.stop - tile.token <= 0
            continue
        assert bounds[tile.row] <= tile.start < tile.stop <= bounds[tile.row + 1]
        first = rows[tile.row][1] - rows[tile.row][0]
        assert tile.position == first + tile.token - bounds[tile.row]
        assert tile.seq_len == rows[tile.row][1]
    assert sorted(seen) == list(range(bounds[-1] + padding))


def test_the_heaviest_tiles_come_first_and_those_of_a_row_stay_together():
    tiles = cut_rows([(64, 1000), (1, 3000), (64, 1000), (0, 5000)], 8)
    assert [tile.row for tile in tiles[:5]] == [1, 0, 0, 2, 2]
    assert tiles[1].token > tiles[2].token
    assert tiles[-1].seq_len == 0


def test_a_window_bounds_the_keys_that_a_row_reads():
    (tile,) = cut_rows([(8, 1000)], 0, window=100)
    assert tile.first_key == 1000 - 8 + 1 - 100


def test_what_it_cannot_take_is_refused_with_the_number_that_it_got():
    fine = Geometry(8, 1, 64, 16, jnp.bfloat16)
    assert fine.refusal() is None
    for changes, named in (
        ({"dtype": jnp.float32}, "float32"),
        ({"head_dim": 80}, "got 80"),
        ({"page_size": 20}, "got 20"),
        ({"scaled": True, "dtype": jnp.float16}, "got float16"),
        ({"scaled": True, "head_dim": 256}, "less than 256"),
    ):
        assert named in dataclasses.replace(fine, **changes).refusal()
    inputs = Case("", ((2, 5),), **SMALL, page_size=12).inputs()
    with pytest.raises(ValueError, match="page_size must be a multiple of 8, got 12"):
        attend_as_called(inputs)


def attend_as_called(inputs):
    arrays = {name: jnp.asarray(inputs[name]) for name in ARRAYS[:6]}
    return mosaic_gpu.ragged_attention(AttentionArrays(**arrays), ScoreOptions(1.0))


@pytest.mark.skipif(gpu_arch() == 90, reason="the GPU here is the one it needs")
def test_it_refuses_devices_that_are_not_hopper():
    inputs = Case("", ((2, 5),), **SMALL).inputs()
    arrays = [jnp.asarray(inputs[name]) for name in ARRAYS[:2]]
    assert "needs an sm90 GPU, found" in mosaic_gpu.why_not(*arrays)


MIXED = (
    *((1, 40), (17, 33), (0, 0), (300, 1000), (129, 129)),
    *((64, 640), (1, 1), (0, 77), (700, 700), (5, 1024)),
)
HOSTILE = {
    "page 16": Case("", MIXED, 37),
    "page 64": Case("", MIXED, 37, page_size=64),
    "page 8": Case("", MIXED, 37, page_size=8),
    "page 48": Case("", MIXED, 1, page_size=48),
    "static": Case("", MIXED, 37, page_size=1024),
    "window": Case("", MIXED, 37, page_size=32, window=100),
    "window, cap, sinks": Case("", MIXED, 37, window=257, soft_cap=20.0, sinks=True),
    "long window": Case("", MIXED, 3, page_size=128, window=600),
    "gpt-oss": Case("", MIXED, 37, heads=64, head_dim=64, sinks=True, window=128),
    "gemma": Case("", MIXED, 37, heads=8, kv_heads=4, head_dim=256, window=300, soft_cap=50.0),
    "wide": Case("", MIXED, 37, heads=16, kv_heads=1, head_dim=256, page_size=64, sinks=True),
    "head_dim 192, groups of 5": Case("", MIXED, 37, heads=40, head_dim=192, page_size=64),
    "groups of 7": Case("", MIXED, 37, heads=28, kv_heads=4),
    "16 heads, one key head": Case("", MIXED, 37, heads=16, kv_heads=1, page_size=64),
    "as many key heads": Case("", MIXED, 37, heads=4, kv_heads=4),
    "padding only": Case("", ((0, 0), (0, 9)), 50),
    "fp8": Case("", MIXED, 37, quantised="float8_e4m3fn"),
    "int8, window, cap, sinks": Case(
        "", MIXED, 37, page_size=64, window=300, soft_cap=20.0, sinks=True, quantised="int8"
    ),
    "one token": Case("", ((1, 5),)),
}
FLOAT16 = [("page 16", "float16"), ("gpt-oss", "float16")]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in HOSTILE), *FLOAT16])
def test_it_equals_the_oracle_whatever_lies_in_unseen_places(name, dtype):
    """The bits are the same each time."""
    case = HOSTILE[name]
    inputs = case.inputs(1, dtype)
    hide_unseen_pages(case, inputs)
    tokens, rows = len(inputs["q"]), len(case.rows)
    geometry = Geometry.of(inputs["q"], inputs["k_pages"])
    schedule = Schedule.of(geometry, tokens, rows, case.window)
    out, lse = attend(case, schedule, inputs)
    assert_is_oracle((out, lse), inputs, dtype)
    for _ in range(10):
        assert bits(attend(case, schedule, inputs)[0]) == bits(out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [HOSTILE["page 16"], HOSTILE["window, cap, sinks"]], ids=str)
def test_rows_that_start_at_any_token_get_the_same_bits(case):
    """The place of a row among the others decides how it is cut into tiles, and changes no bit."""
    inputs = case.inputs(2)
    order = np.random.default_rng(3).permutation(len(case.rows))
    bounds = inputs["cu_q_lens"]
    token = np.concatenate([np.arange(bounds[row], bounds[row + 1]) for row in order])
    counts = np.diff(bounds)[order]
    moved = {name: inputs[name][order] for name in ("page_table", "seq_lens")}
    moved["q"] = inputs["q"][np.concatenate([token, np.arange(bounds[-1], len(inputs["q"]))])]
    moved["cu_q_lens"] = np.cumsum([0, *counts]).astype(np.int32)
    schedule = Schedule(128, 2, 2, ONE_BLOCK_EACH)
    out, lse = attend(case, schedule, inputs)
    moved_out, moved_lse = attend(case, schedule, {**inputs, **moved})
    assert [bits(out)[place] for place in token] == bits(moved_out)[: len(token)]
    assert [bits(lse)[place] for place in token] == bits(moved_lse)[: len(token)]


SCHEDULES = [
    ("page 16", Schedule(64, 3, 2, 132)),
    ("page 16", Schedule(128, 3, 1, 132)),
    ("page 64", Schedule(128, 2, 1, ONE_BLOCK_EACH)),
    ("long window", Schedule(64, 4, 2, ONE_BLOCK_EACH)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "schedule"), SCHEDULES, ids=str)
def test_other_schedules_give_the_answer_too(name, schedule):
    inputs = HOSTILE[name].inputs(4)
    assert_is_oracle(attend(HOSTILE[name], schedule, inputs), inputs, "bfloat16")


@pytest.mark.gpu
def test_pages_past_two_to_the_31_elements_are_read_where_they_lie():
    """The pool has 4.3 billion elements, and its last page holds the only keys."""
    pool = jnp.zeros((2**16 + 1, 64, 8, 128), jnp.bfloat16)
    pool = jax.jit(lambda pool: pool.at[-1].set(1), donate_argnums=0)(pool)
    q = jnp.zeros((3, 32, 128), jnp.bfloat16)
    table, lens = jnp.full((1, 1), 2**16, jnp.int32), jnp.full(1, 3, jnp.int32)
    bounds = jnp.array([0, 3], jnp.int32)
    arrays = AttentionArrays(q, pool, pool, table, lens, bounds)
    out = mosaic_gpu.ragged_attention(arrays, ScoreOptions(1.0))
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)


def test_heads_of_a_pack_belong_to_one_group():
    for geometry in geometries():
        group = geometry.heads // geometry.kv_heads
        assert group % geometry.pack == 0
        assert geometry.tokens_per_consumer % 8 == 0
    packs = [Geometry(heads, 1, 64, 16, jnp.bfloat16).pack for heads in (1, 2, 4, 6, 7, 8, 16)]
    assert packs == [1, 2, 4, 2, 1, 8, 8]


@pytest.mark.parametrize("rows", [[(1, 1)] * 9, [(33, 33)] * 3, [(0, 0), (40, 50)]], ids=str)
def test_no_batch_needs_more_tiles_than_are_made(rows):
    cut_rows(rows, 1)

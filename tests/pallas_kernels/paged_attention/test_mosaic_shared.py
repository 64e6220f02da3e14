"""The kernel of keys that rows of `paged_attention` share: interpreted, and on a GPU beside rows that share nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.paged_attention import mosaic_gpu, mosaic_shared
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.mosaic_schedule import Geometry, Schedule
from pallas_kernels.paged_attention.mosaic_shared import SharedGeometry
from pallas_kernels.shared_keys import ROWS_PER_TILE, SharedKeys
from tests.pallas_kernels import oracle
from tests.pallas_kernels.contract import bits
from tests.tolerances import assert_lse, assert_output

SMALL = Case("", (), heads=8, kv_heads=2, head_dim=64)


def small(*seq_lens, **changes):
    return dataclasses.replace(SMALL, seq_lens=seq_lens, **changes)


def sharing(case, tiles, seed=1):
    """Returns inputs in which the rows of each tile begin with the pages of its first row, and the `SharedKeys`.

    `tiles` has (rows, shared keys) of each tile.
    """
    inputs = case.inputs(seed)
    table, rows = inputs["page_table"], len(case.seq_lens)
    of_place = np.full(ROWS_PER_TILE * len(tiles), rows + 5, np.int32)
    places = np.full(rows, len(of_place), np.int32)
    for tile, (members, shared) in enumerate(tiles):
        assert shared % case.page_size == 0
        first = ROWS_PER_TILE * tile
        of_place[first : first + len(members)] = members
        places[members] = range(first, first + len(members))
        for member in members:
            table[member, : shared // case.page_size] = table[
                members[0], : shared // case.page_size
            ]
    lens = np.array([shared for _, shared in tiles], np.int32)
    return inputs, SharedKeys(*map(jnp.asarray, (of_place, places, lens)))


def attend(case, schedule, inputs, shared, *, interpret=False):
    arrays = AttentionArrays(*(inputs.get(name) for name in AttentionArrays._fields))
    return mosaic_gpu.attend(
        jax.tree.map(jnp.asarray, arrays),
        shared,
        options=ScoreOptions(scale=inputs["scale"], soft_cap=case.soft_cap),
        schedule=schedule,
        want_lse=True,
        interpret=interpret,
    )


def assert_is_oracle(result, inputs):
    wanted_out, wanted_lse = oracle.paged_attention(**inputs)
    assert_output(result[0], wanted_out, "bfloat16")
    assert_lse(result[1], wanted_lse)


INTERPRETED = {
    # A row that has stopped is empty in later steps of a program, which keeps its tiles.
    "small pages, a row of no tile, one without keys, an empty tile": (
        small(150, 70, 140, 0),
        (([2, 0, 3], 128), ([], 0)),
        Schedule(1, 1, 2),
    ),
    "two tiles, parts, sinks": (
        small(130, 200, 90, 80, page_size=64, sinks=True),
        (([0, 1], 128), ([3, 2], 64)),
        Schedule(1, 2, 1),
    ),
    "groups across 8 rows, a cap": (
        small(260, 195, heads=14, page_size=64, soft_cap=5.0),
        (([1, 0], 192),),
        Schedule(1, 1, 3),
    ),
    "wide heads, sinks of a group of 16": (
        small(100, 66, heads=16, kv_heads=1, head_dim=192, page_size=64, sinks=True),
        (([1, 0], 64),),
        Schedule(1, 1, 1),
    ),
}
FAST = (
    "small pages, a row of no tile, one without keys, an empty tile",
    "two tiles, parts, sinks",
)


@pytest.mark.parametrize(
    ("case", "tiles", "schedule"),
    [
        pytest.param(*given, id=name, marks=[pytest.mark.slow] * (name not in FAST))
        for name, given in INTERPRETED.items()
    ],
)
def test_interpreted_it_equals_the_oracle_without_a_race(case, tiles, schedule, races):
    """Places that must not be read hold NaN, and a read out of bounds raises."""
    inputs, shared = sharing(case, tiles)
    assert_is_oracle(attend(case, schedule, inputs, shared, interpret=True), inputs)
    assert not races()


def test_interpreted_a_block_with_more_tiles_than_stages_equals_the_oracle(monkeypatch, races):
    """So few tiles of rows have a block for each tile of keys otherwise."""
    monkeypatch.setattr(mosaic_shared, "_MOST_PARTS", 1)
    inputs, shared = sharing(small(300, 260, page_size=64), (([0, 1], 256),))
    found = attend(SMALL, Schedule(1, 1, 2), inputs, shared, interpret=True)
    assert_is_oracle(found, inputs)
    assert not races()


@pytest.mark.slow
def test_the_keys_that_are_shared_are_read_by_way_of_the_first_row(races):
    """Seen by a seeded defect: a row whose own table names other pages there gets the first row's answer."""
    case = small(140, 140)
    inputs, shared = sharing(case, (([0, 1], 128),))
    wrong = inputs["page_table"].copy()
    wrong[1, :8] = 2**30
    out, lse = attend(
        case, Schedule(1, 1, 2), inputs | {"page_table": wrong}, shared, interpret=True
    )
    assert_is_oracle((out, lse), inputs)
    assert not races()


def test_blocks_have_as_many_rows_as_a_product_holds():
    for heads, head_dim, rows in ((8, 128, 8), (16, 256, 8), (32, 64, 4), (64, 128, 2)):
        geometry = Geometry(heads, 2, head_dim, 16, jnp.bfloat16)
        assert SharedGeometry.within(geometry).rows == rows
    assert SharedGeometry.within(Geometry(80, 2, 64, 16, jnp.bfloat16)) is None
    assert SharedGeometry.within(Geometry(8, 2, 64, 16, jnp.bfloat16, jnp.int8)) is None


def test_tiles_that_do_not_fit_are_refused_with_the_shape_wanted():
    inputs, shared = sharing(small(140, 140), (([0, 1], 128),))
    arrays = {name: inputs[name] for name in ("q", "k_pages", "v_pages", "page_table", "seq_lens")}
    for changed, named in (
        ({"rows": shared.rows[:7]}, r"shared.rows must have shape \[8\], got \[7\]"),
        ({"places": shared.places[:1]}, r"shared.places must have shape \[2\], got \[1\]"),
        ({"lens": shared.lens.astype(jnp.int8)}, "shared.lens must be int32, got int8"),
    ):
        with pytest.raises(ValueError, match=named):
            paged_attention(**arrays, scale=1.0, shared=shared._replace(**changed))


def test_xla_reads_all_keys_of_each_row():
    case = small(140, 70, 140)
    inputs, shared = sharing(case, (([0, 2], 128),))
    run = dict(inputs, implementation="xla", return_lse=True)
    assert_is_oracle(paged_attention(**run, shared=shared), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "schedule"),
    [
        ({}, (1, 1, 2)),
        ({"page_size": 64}, (2, 1, 2)),
        ({"page_size": 64, "heads": 16}, (1, 3, 2)),
        ({"heads": 64, "head_dim": 64, "sinks": True}, (1, 1, 3)),
        ({"heads": 28, "kv_heads": 4, "page_size": 64, "soft_cap": 30.0}, (1, 1, 2)),
        ({"heads": 16, "kv_heads": 1, "head_dim": 256, "page_size": 64}, (2, 1, 1)),
        ({"heads": 32, "kv_heads": 1, "page_size": 64, "sinks": True}, (1, 1, 2)),
    ],
    ids=str,
)
def test_on_a_gpu_it_is_the_answer_always_and_wherever_a_row_is(changes, schedule):
    """Repeats have equal bits, and so has a row at another place of its tile."""
    lens = (1000, 1100, 900, 1152, 832, 1, 0, 77, 1025, 1025, 1151, 833)
    case = dataclasses.replace(Case("", lens), **changes)
    case = dataclasses.replace(case, table_width=1152 // case.page_size)
    tiles = (([3, 0, 1, 2, 4], 768), ([9, 8, 10, 11], 832))
    inputs, shared = sharing(case, tiles)
    result = attend(case, Schedule(*schedule), inputs, shared)
    assert_is_oracle(result, inputs)
    for _ in range(20):
        again = attend(case, Schedule(*schedule), inputs, shared)
        assert bits(again[0]) == bits(result[0])
    # The first row stays, so that the tables do.
    moved = (([9, 11, 10, 8], 832), ([3, 4, 2, 1, 0], 768))
    same, shared = sharing(case, moved)
    np.testing.assert_array_equal(same["page_table"], inputs["page_table"])
    assert bits(attend(case, Schedule(*schedule), inputs, shared)[0]) == bits(result[0])


@pytest.mark.gpu
def test_on_a_gpu_more_blocks_than_multiprocessors_have_the_answer():
    """Two blocks are resident on each then, with fewer tiles in flight."""
    rows = 256
    rng = np.random.default_rng(0)
    lens = tuple(int(length) for length in rng.integers(513, 640, rows))
    case = Case("", lens, page_size=64, table_width=10)
    tiles = [(list(range(at, at + 8)), 512) for at in range(0, rows, 8)]
    tiles += [([], 0)] * (rows // 4 - len(tiles))
    inputs, shared = sharing(case, tiles)
    together = attend(case, Schedule(1, 1, 3), inputs, shared)
    alone = attend(case, Schedule(1, 1, 3), inputs, None)
    np.testing.assert_allclose(
        np.asarray(together[0], np.float32), np.asarray(alone[0], np.float32), atol=2e-2
    )
    np.testing.assert_allclose(together[1], alone[1], atol=2e-5, rtol=2e-5)

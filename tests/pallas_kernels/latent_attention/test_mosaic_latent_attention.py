"""The Mosaic GPU kernel of `latent_attention` itself: interpreted, compiled without a GPU, hostile cases on one.

What it shares with other implementations is tested in test_latent_attention.py.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.arguments.latent import LatentArrays, LatentOptions
from pallas_kernels.device import NEWEST_JAX, gpu_arch
from pallas_kernels.latent_attention import mosaic_gpu
from pallas_kernels.latent_attention.cases import Case
from pallas_kernels.latent_kernel.pieces import cut, most_pieces
from pallas_kernels.latent_kernel.schedule import (
    Geometry,
    Schedule,
    filled_heads,
    shape_class,
)
from pallas_kernels.mosaic.jax_versions import honours_register_requests
from pallas_kernels.workbench.search_space import latent_candidates
from tests.pallas_kernels.contract import bits, by_name
from tests.pallas_kernels.h200.reports import reports_of
from tests.pallas_kernels.latent_attention.oracle import assert_is_oracle

ALONE = Schedule(1, 1)


def decode(*seq_lens):
    return tuple((min(1, keys), keys) for keys in seq_lens)


def attend(case, schedule, inputs, *, interpret=False):
    """Runs the kernel under a schedule of our choice."""
    arrays = LatentArrays(*(inputs.get(name) for name in LatentArrays._fields))
    return mosaic_gpu.attend(
        jax.tree.map(jnp.asarray, arrays),
        options=LatentOptions(case.value_dim, inputs["scale"]),
        schedule=schedule,
        want_lse=True,
        interpret=interpret,
    )


def hide_unseen_pages(case, inputs):
    """Page ids that hold no key to see may be any number."""
    for row, (queries, keys) in enumerate(case.rows):
        first = -(-keys // case.page_size) if queries else 0
        inputs["page_table"][row, first:] = 2**30 + row


SMALL = {"heads": 16, "value_dim": 128, "name": ""}
INTERPRETED = {
    "no tile, one key, a tile, pairs, and a tile of the last pair that is not there": (
        Case(rows=decode(0, 1, 64, 130), page_size=16, **SMALL),
        ALONE,
    ),
    "shares of a row, some of them empty": (
        Case(rows=decode(300, 70), page_size=128, **SMALL),
        Schedule(1, 3),
    ),
    "packed: odd heads, a chunk over a pair's edge, an idle row, padding": (
        Case(
            rows=((1, 20), (3, 130), (0, 20)),
            packed=True,
            padding_tokens=2,
            **(SMALL | {"heads": 12}),
        ),
        ALONE,
    ),
}


# Keys do not stand on the left of these.
MANY_HEADS = {
    f"40 heads: {name}": (dataclasses.replace(case, heads=40), schedule)
    for name, (case, schedule) in INTERPRETED.items()
    if not case.packed
}
# Outputs are let be until scores have risen far: some far enough, or none.
SLOW = [
    (name, factor) for name in MANY_HEADS for factor in (1, 8) if "shares" in name or factor == 8
]
# Of one block for a row; shares of a row end in the same way.
SLOW.append((next(iter(INTERPRETED)), 8))
INTERPRETED_CASES = [
    pytest.param(
        case,
        schedule,
        factor,
        id=f"{name}, times {factor}",
        marks=[pytest.mark.slow] * ((name, factor) in SLOW),
    )
    for name, (case, schedule) in (INTERPRETED | MANY_HEADS).items()
    for factor in (1, 8)
    if factor == 8 or case.heads == 40
]


@pytest.mark.parametrize(("case", "schedule", "factor"), INTERPRETED_CASES)
def test_interpreted_it_equals_the_oracle_without_a_race(case, schedule, factor, races):
    """Places that must not be read hold NaN, and a read out of bounds raises."""
    inputs = case.inputs(1)
    inputs["q"] *= factor
    hide_unseen_pages(case, inputs)
    assert_is_oracle(attend(case, schedule, inputs, interpret=True), inputs, "bfloat16")
    assert not races()


@pytest.mark.slow
def test_interpreted_it_equals_the_oracle_without_a_producer(no_requests, races):
    """A piece of the last pair is not there, and keys of a row are hidden from its first query."""
    case, schedule = next(each for each in INTERPRETED.values() if each[0].packed)
    test_interpreted_it_equals_the_oracle_without_a_race(case, schedule, 8, races)


def test_interpreted_more_than_64_heads_share_a_row_between_blocks(races):
    case = Case(rows=decode(70), page_size=32, **(SMALL | {"heads": 100}))
    inputs = case.inputs(2)
    assert_is_oracle(attend(case, ALONE, inputs, interpret=True), inputs, "bfloat16")
    assert not races()


@pytest.mark.parametrize(
    ("value_dim", "heads"), [(512, 5), pytest.param(256, 24, marks=pytest.mark.slow)]
)
def test_interpreted_keys_on_the_left_come_in_pieces_of_any_width(value_dim, heads, races):
    """More of them than the ring has; those of 64 columns are in the first test too."""
    case = Case(name="", rows=decode(330), heads=heads, value_dim=value_dim, page_size=32)
    inputs = case.inputs(3)
    result = attend(case, ALONE, inputs, interpret=True)
    assert_is_oracle(result, inputs, "bfloat16")
    assert not races()


@pytest.fixture(scope="module")
def reports():
    """Compiles what h200/latent.py names in one process: about 40 seconds on two idle cores."""
    if jax.__version_info__[:2] > NEWEST_JAX:
        pytest.skip("the kernels refuse this JAX; why_not says so")
    found = reports_of("latent.py")
    assert found["16 heads, keys on the left"]["schedule"][0] > 1
    return found


@pytest.mark.slow
def test_it_spills_no_register_and_its_products_overlap(reports):
    """168 registers are all that three warpgroups can start with, and 256 two; consumers may then take more.

    Where requests for more are ignored all kernels have two.
    """
    for name, report in reports.items():
        assert report["spilled"] == 0, name
        assert len(report["registers"]) == 1, name
        most = 256 if "left" in name or not honours_register_requests() else 168
        assert report["registers"][0] <= most, name
        assert not report["serialised"], name


@pytest.mark.slow
def test_no_pool_is_copied(reports):
    for name, report in reports.items():
        assert report["temp_bytes"] < 2**22, name


@pytest.mark.slow
def test_it_lowers_for_cuda_without_a_gpu():
    """Layouts are inferred and shared memory is counted here, so neither can fail on a GPU first."""
    if jax.__version_info__[:2] > NEWEST_JAX:
        pytest.skip("the kernels refuse this JAX; why_not says so")
    shapes = [(40, 16, 576), (9, 16, 1, 576), (2, 16), (2,), (3,)]
    dtypes = [jnp.float16] * 2 + [jnp.int32] * 3
    arguments = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes, strict=True)]
    run = partial(mosaic_gpu.attend, options=LatentOptions(512, 1.0), want_lse=True)
    run = partial(run, schedule=Schedule(2, 1))
    lowered = jax.jit(run).trace(LatentArrays(*arguments)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def geometries():
    for heads in (1, 8, 12, 16, 32, 64, 100, 128):
        for value_dim in (128, 256, 384, 512):
            for packed in (False, True):
                given = (filled_heads(heads), value_dim + 64, value_dim, 64, jnp.bfloat16, packed)
                yield Geometry(*given)


def test_every_schedule_gives_each_block_of_a_cluster_whole_columns():
    for geometry in geometries():
        assert geometry.refusal() is None
        for pieces, capacity in ((1, 64), (1, 4096), (8, 32768), (64, 4096), (1000, 4096)):
            found = latent_candidates(geometry, pieces, capacity)
            assert found[0] == Schedule.of(geometry, pieces, capacity)
            assert len(found) == len(set(found))
            for schedule in found:
                assert schedule.is_possible(geometry, capacity), schedule
                assert geometry.half % 64 == 0
                assert geometry.value_dim // schedule.cluster % 64 == 0


def test_keys_stand_on_the_left_for_few_heads_of_one_query_alone():
    for geometry in geometries():
        assert geometry.keys_are_left == (geometry.heads <= 32 and not geometry.packed)


def test_a_tuned_schedule_is_taken_only_if_the_kernel_can_run_under_it(monkeypatch):
    geometry = Geometry(128, 576, 512, 64, jnp.bfloat16, False)
    monkeypatch.setattr(tuning, "tuned", lambda *_: fields)
    good = {"cluster": 4, "parts": 1}
    fields = good
    assert Schedule.of(geometry, 8, 4096) == Schedule(4, 1)
    rule = Schedule.by_rule(geometry, 8, 4096)
    assert rule != Schedule(4, 1)
    for changes in ({"cluster": 16}, {"cluster": 3}, {"parts": 0}, {"parts": 2}):
        fields = good | changes
        assert Schedule.of(geometry, 8, 4096) == rule, changes
    for fields in ({"cluster": 2}, {"cluster": 1, "parts": 33}):  # noqa: B007 - `tuned` reads it
        assert Schedule.of(geometry, 8, 4096) == rule


def test_shapes_of_one_class_share_a_tuned_schedule():
    geometry = Geometry(128, 576, 512, 64, jnp.bfloat16, False)
    assert shape_class(geometry, 64, 4096) == shape_class(geometry, 50, 3000)
    assert shape_class(geometry, 64, 4096) != shape_class(geometry, 64, 8192)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", [1, 4])
def test_pieces_cover_every_token_once_and_know_what_it_sees(seed, size):
    rng = np.random.default_rng(seed)
    queries = rng.integers(0, 9, 6) * rng.integers(0, 2, 6)
    keys = queries + rng.integers(0, 90, 6)
    padding = int(rng.integers(0, 7)) + (not queries.any())
    bounds = np.cumsum([0, *queries]).astype(np.int32)
    tokens = int(bounds[-1]) + padding
    arrays = jnp.asarray(keys, jnp.int32), jnp.asarray(bounds)
    pieces = jax.jit(partial(cut, tokens=tokens, tokens_per_piece=size))(*arrays)
    assert len(pieces) == most_pieces(tokens, 6, size)
    seen = []
    for row, token, count, first_keys in np.asarray(pieces):
        assert count <= size
        seen += range(token, token + count)
        if token >= bounds[-1] or not count:
            assert first_keys == 0 or not count
            continue
        assert bounds[row] <= token < token + count <= bounds[row + 1]
        assert first_keys == keys[row] - queries[row] + token - bounds[row] + 1
    assert sorted(seen) == list(range(tokens))


def test_what_it_cannot_take_is_refused_with_the_number_that_it_got():
    fine = Geometry(16, 576, 512, 16, jnp.bfloat16, False)
    assert fine.refusal() is None
    for changes, named in (
        ({"dtype": jnp.float32}, "got float32"),
        ({"value_dim": 640, "width": 704}, "got 640"),
        ({"width": 544}, "got 544"),
        ({"page_size": 48}, "got 48"),
    ):
        assert named in dataclasses.replace(fine, **changes).refusal()
    inputs = Case(rows=decode(5), **(SMALL | {"page_size": 12})).inputs()
    with pytest.raises(ValueError, match="got 12"):
        by_name(mosaic_gpu.latent_attention, LatentArrays, LatentOptions)(**inputs)


def test_a_grid_is_not_longer_than_the_card_takes(monkeypatch):
    """One query of 64 heads is a piece of its own, four of 16 heads are one."""
    monkeypatch.setattr(mosaic_gpu, "why_not_mosaic", lambda: None)
    pages = jnp.zeros((1, 64, 1, 192), jnp.bfloat16)
    tables = jnp.zeros((1, 1024), jnp.int32), jnp.array([2**16]), jnp.array([0, 2**16])

    def said(heads):
        q = jax.ShapeDtypeStruct((2**16, heads, 192), jnp.bfloat16)
        return mosaic_gpu.why_not(LatentArrays(q, pages, *tables), LatentOptions(128, 1.0))

    assert said(16) is None
    assert "at most 65535 pieces of queries in a call, got" in str(said(64))


@pytest.mark.skipif(gpu_arch() == 90, reason="the GPU here is the one it needs")
def test_it_refuses_devices_that_are_not_hopper():
    inputs = Case(rows=decode(5), **SMALL).inputs()
    why_not = by_name(mosaic_gpu.why_not, LatentArrays, LatentOptions)
    assert "needs an sm90 GPU, found" in why_not(**inputs)


EDGES = decode(0, 1, 63, 64, 65, 127, 128, 129, 300, 1000)
MIXED = ((9, 9), (1, 700), (0, 20), (130, 200), (1, 1), (33, 290))
HOSTILE = {
    "16 heads": (Case(name="", rows=EDGES, heads=16), ALONE),
    "16 heads, clusters, page 16": (
        Case(name="", rows=EDGES, heads=16, page_size=16),
        Schedule(2, 1),
    ),
    "16 heads, parts": (Case(name="", rows=EDGES, heads=16), Schedule(1, 3)),
    "32 heads, clusters, page 8": (
        Case(name="", rows=EDGES, heads=32, page_size=8),
        Schedule(4, 1),
    ),
    "5 heads of 384, parts, page 128": (
        Case(name="", rows=EDGES, heads=5, value_dim=384, page_size=128),
        Schedule(1, 3),
    ),
    "5 heads of 128, page 192": (
        Case(name="", rows=EDGES, heads=5, value_dim=128, page_size=192),
        ALONE,
    ),
    "40 heads, clusters, page 16": (
        Case(name="", rows=EDGES, heads=40, page_size=16),
        Schedule(2, 1),
    ),
    "64 heads, parts": (Case(name="", rows=EDGES, heads=64), Schedule(1, 3)),
    "128 heads": (Case(name="", rows=EDGES), ALONE),
    "128 heads, page 128, clusters": (
        Case(name="", rows=EDGES, page_size=128),
        Schedule(4, 1),
    ),
    "128 heads, page 32, parts": (Case(name="", rows=EDGES, page_size=32), Schedule(1, 2)),
    "100 heads of 256": (Case(name="", rows=EDGES, heads=100, value_dim=256), ALONE),
    "packed, 16 heads": (
        Case(name="", rows=MIXED, packed=True, padding_tokens=5, heads=16),
        Schedule(2, 1),
    ),
    "packed, 24 heads": (
        Case(name="", rows=MIXED, packed=True, heads=24, value_dim=384, page_size=8),
        ALONE,
    ),
    "packed, 128 heads": (Case(name="", rows=MIXED, packed=True, padding_tokens=2), ALONE),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "schedule"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("factor", [1, 8])
def test_it_equals_the_oracle_whatever_lies_in_unseen_places(case, schedule, factor):
    """The bits are the same each time, for scores that rise far and for scores that hardly rise."""
    inputs = case.inputs(1)
    inputs["q"] *= factor
    hide_unseen_pages(case, inputs)
    out, lse = attend(case, schedule, inputs)
    assert_is_oracle((out, lse), inputs, "bfloat16")
    for _ in range(10):
        assert bits(attend(case, schedule, inputs)[0]) == bits(out)


@pytest.mark.gpu
def test_pages_past_two_to_the_31_elements_are_read_where_they_lie():
    """The pool has 2.4 billion elements, and its last page holds the only keys."""
    pool = jnp.zeros((2**16 + 1, 64, 1, 576), jnp.bfloat16)
    pool = jax.jit(lambda pool: pool.at[-1].set(1), donate_argnums=0)(pool)
    q = jnp.zeros((1, 16, 576), jnp.bfloat16)
    table, lens = jnp.full((1, 1), 2**16, jnp.int32), jnp.full(1, 3, jnp.int32)
    out = mosaic_gpu.latent_attention(LatentArrays(q, pool, table, lens), LatentOptions(512, 1.0))
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)

"""How the decode kernel shares out keys: rules, tuned schedules, and what fits. Nothing is traced."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.device import SHARED_BYTES_PER_BLOCK
from pallas_kernels.paged_attention.mosaic_schedule import Geometry, Schedule
from pallas_kernels.workbench.search_space import decode_candidates


def geometries():
    for heads, kv_heads in ((1, 1), (14, 2), (28, 4), (32, 8), (40, 8), (64, 8), (32, 1), (8, 8)):
        for head_dim in (64, 128, 192, 256):
            for stored in (None, jnp.float8_e4m3fn):
                geometry = Geometry(heads, kv_heads, head_dim, 16, jnp.bfloat16, stored)
                if geometry.refusal() is None:
                    yield geometry


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("capacity", [64, 1152, 4096, 131072])
def test_every_schedule_fits_in_shared_memory(capacity, window):
    found = list(geometries())
    assert len(found) > 20
    for geometry, rows in itertools.product(found, (1, 2, 3, 8, 16, 64, 256)):
        schedule = Schedule.of(geometry, rows, capacity, window)
        assert geometry.shared_bytes(schedule) <= SHARED_BYTES_PER_BLOCK, schedule
        assert schedule.cluster <= 8
        assert min(dataclasses.astuple(schedule)) >= 1


MEASURED = {
    (1, 1152): (8, 1, 3),
    (2, 1152): (4, 1, 3),
    (4, 1152): (2, 1, 3),
    (8, 1152): (2, 1, 3),
    (16, 1152): (1, 1, 3),
    (64, 1152): (1, 1, 3),
    (64, 4096): (1, 1, 3),
    (8, 32768): (2, 1, 3),
    (4, 32768): (2, 2, 3),
    (1, 32768): (2, 8, 3),
    (1, 131072): (2, 8, 3),
}


@pytest.mark.parametrize(("shape", "fastest"), MEASURED.items(), ids=str)
def test_a_llama_runs_under_the_schedule_that_was_fastest(shape, fastest):
    llama = Geometry(32, 8, 128, 64, jnp.bfloat16)
    assert Schedule.by_rule(llama, *shape, None) == Schedule(*fastest)


def test_keys_of_8_bits_get_as_many_blocks_as_there_is_room_for():
    llama = Geometry(32, 8, 128, 64, jnp.bfloat16, jnp.float8_e4m3fn)
    assert Schedule.by_rule(llama, 64, 4096, None) == Schedule(1, 1, 2)
    assert Schedule.by_rule(llama, 8, 32768, None) == Schedule(1, 8, 2)


def test_a_few_heads_over_many_keys_are_joined_by_xla_too():
    small_model = Geometry(14, 2, 64, 64, jnp.bfloat16)
    assert Schedule.by_rule(small_model, 1, 131072, None) == Schedule(2, 33, 3)
    assert Schedule.by_rule(small_model, 1, 131072, 1024).parts == 1


@pytest.mark.parametrize("stored", [None, jnp.int8])
def test_a_tuned_schedule_takes_the_place_of_the_rules_if_the_kernel_can_run_it(
    monkeypatch, stored
):
    llama = Geometry(32, 8, 128, 64, jnp.bfloat16, stored)
    asked = []

    def tuned(op, name):
        asked.append((op, name))
        return fields

    monkeypatch.setattr(tuning, "tuned", tuned)
    fields = {"cluster": 4, "parts": 2, "stages": 2}
    assert Schedule.of(llama, 8, 3000, None) == Schedule(4, 2, 2)
    rule = Schedule.by_rule(llama, 8, 3000, None)
    for fields in (  # noqa: B007 - `tuned` reads it
        None,
        {"cluster": 4, "parts": 2},
        {"cluster": 8, "parts": 16, "stages": 2},
        {"cluster": 1, "parts": 1, "stages": 40},
        {"cluster": 16, "parts": 1, "stages": 1},
        {"cluster": 1, "parts": 0, "stages": 1},
    ):
        assert Schedule.of(llama, 8, 3000, None) == rule
    name = "bfloat16" if stored is None else "int8"
    assert set(asked) == {("paged_attention", f"rows 8 keys 4096 heads 32/8x128 page 64 {name}")}


def test_candidates_are_possible_distinct_and_begin_with_the_rules_choice():
    for geometry, rows in itertools.product(list(geometries())[::7], (1, 64)):
        found = decode_candidates(geometry, rows, 4096, None)
        assert found[0] == Schedule.by_rule(geometry, rows, 4096, None)
        assert len(set(found)) == len(found) < 80
        assert all(schedule.is_possible(geometry, 64) for schedule in found)


def test_queries_of_a_group_are_fetched_in_whole_tiles_that_stay_in_the_padded_array():
    for geometry in geometries():
        for head in range(geometry.kv_heads):
            first = head * geometry.group // 8 * 8
            assert first + geometry.columns <= geometry.padded_heads
            assert first <= head * geometry.group
            assert (head + 1) * geometry.group <= first + geometry.columns

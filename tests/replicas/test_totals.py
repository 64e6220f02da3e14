"""Statistics of replicas add up."""

from jaxkv.cache.kept_pages.stats import PrefixStats
from jaxkv.monitoring.stats import GroupStats
from jaxkv.replicas.totals import total


def test_numbers_are_added_and_texts_are_the_first_ones():
    parts = [
        {"steps": 3, "wait": 0.5, "device": "H200", "weights": {"bfloat16": 8}, "prefix": None},
        {"steps": 4, "wait": 1.0, "device": "H100", "weights": {"float32": 1}, "prefix": None},
    ]
    assert total(parts) == {
        "steps": 7,
        "wait": 1.5,
        "device": "H200",
        "weights": {"bfloat16": 8, "float32": 1},
        "prefix": None,
    }


def test_groups_and_positions_are_added_one_by_one():
    group = GroupStats(name="gqa", unit="page", total=9, free=4, used=3, kept=2, num_bytes=90)
    [both] = total([(group,), (group,)])
    assert (both.name, both.total, both.free, both.num_bytes) == ("gqa", 18, 8, 180)
    assert total([[3, 1], [2, 2]]) == [5, 3]
    # Lists of other lengths have nothing to do with one another.
    assert total([["a"], ["b", "c"]]) == ["a"]


def test_dataclasses_are_added_by_name_and_a_missing_one_counts_nothing():
    assert total([None, PrefixStats(hits=2), PrefixStats(hits=3, misses=1)]) == PrefixStats(
        hits=5, misses=1
    )


def test_a_flag_is_set_if_it_is_in_any():
    assert total([False, True]) is True
    assert total([False, False]) is False

"""The benchmark of host time: its stand-in serves every request, and its parts add up."""

import json

import pytest

from benchmarks.host_steps import main


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    sizes = ["--rows", "3", "--prompt-tokens", "64", "--output-tokens", "72", "--steady", "6"]
    main([*sizes, "--repeats", "2", "--folder", str(folder)])
    return json.loads((folder / "host-steps.json").read_text())["rows"]


def test_there_is_a_row_for_each_kind_of_step(rows):
    assert [(row["rows"], row["steps_of"]) for row in rows] == [
        (3, "steady"),
        (3, "burst"),
        (3, "evicting"),
    ]


def test_the_parts_add_up_to_the_time_of_a_step(rows):
    for row in rows:
        parts = [value for name, value in row.items() if name.endswith("_us") and name != "host_us"]
        assert sum(parts) == pytest.approx(row["host_us"])
        assert all(row[f"{part}_us"] > 0 for part in ("plan", "send", "pack", "collect", "frames"))


def test_only_a_full_cache_evicts(rows):
    evicted = {row["steps_of"]: row["evicted_pages"] for row in rows}
    assert evicted["steady"] == evicted["burst"] == 0
    assert evicted["evicting"] > 0

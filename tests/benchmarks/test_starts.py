"""The benchmark of starts times each way in a process of its own, and only the cold one compiles."""

import pytest

from benchmarks import starts
from benchmarks.record import load_record


@pytest.mark.slow
def test_a_record_has_each_way_to_start(tmp_path):
    starts.main(["--rows", "2", "--max-model-len", "64", "--folder", str(tmp_path)])
    rows = load_record(tmp_path / "starts-default-model.json").rows
    assert [row["start"] for row in rows] == ["cold", "store", "bundle"]
    assert len({row["programs"] for row in rows}) == 1
    assert all(row["compiled_late"] == 0 for row in rows)
    cold, _, bundle = rows
    assert bundle["programs_s"] < 0.1 * cold["programs_s"]

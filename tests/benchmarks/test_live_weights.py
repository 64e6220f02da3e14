"""The benchmark of updates and sleep runs and records its measurements."""

import pytest

from benchmarks import live_weights
from benchmarks.record import load_record


@pytest.mark.slow
def test_a_record_has_updates_sleep_and_wake_up_without_a_compilation(tmp_path):
    sizes = ["--shape", "tiny", "--dtype", "float32", "--cache-bytes", "4194304"]
    live_weights.main([*sizes, "--repeats", "2", "--folder", str(tmp_path)])
    rows = load_record(tmp_path / "live-weights-tiny.json").rows
    assert [row["operation"] for row in rows] == ["update_weights", "sleep", "wake_up"]
    assert all(0 < row["ms"] <= row["slowest_ms"] for row in rows)
    assert all(row["compiled"] == 0 for row in rows)

"""The benchmark of the host tier runs and records its measurements."""

import pytest

from benchmarks import host_tier
from benchmarks.record import load_record


@pytest.mark.slow
def test_both_records_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(host_tier, "_REPEATS", 2)
    monkeypatch.setattr(host_tier, "_WARM_UPS", 1)
    sizes = ["--tokens", "48", "--page-size", "8", "--gibibytes", "0.01"]
    host_tier.main(["--shape", "tiny", "--dtype", "float32", *sizes, "--folder", str(tmp_path)])
    first = load_record(tmp_path / "host-first-token.json")
    assert [row["request"] for row in first.rows] == [
        "computed",
        "kept on the device",
        "kept on the host",
        "kept on the host, another generates",
    ]
    assert all(row["ttft_ms"] > 0 and row["memory"] == "pinned_host" for row in first.rows)
    moved = load_record(tmp_path / "host-transfers.json")
    assert [row["copy"] for row in moved.rows[:2]] == [
        "pinned_host, to the host",
        "pinned_host, to the device",
    ]
    assert all(row["gb_per_second"] > 0 for row in moved.rows)

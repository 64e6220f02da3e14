"""The benchmark of drafts runs and records its measurements."""

import pytest

from benchmarks import speculation
from benchmarks.record import load_record


@pytest.mark.slow
def test_drafts_that_are_always_right_are_tokens_without_steps(tmp_path):
    sizes = ["--shape", "tiny", "--batch", "2", "--drafts", "2", "--acceptance", "0,1"]
    speculation.main([*sizes, "--tokens", "8", "--dtype", "float32", "--folder", str(tmp_path)])
    rows = load_record(tmp_path / "speculation-tiny.json").rows
    assert [row["acceptance"] for row in rows] == ["none", "0", "1", "0, adaptive"]
    plain, never, always, adaptive = rows
    assert always["tokens_per_step"] == always["expected_tokens"] == 3
    assert never["tokens_per_step"] == 1
    assert plain["step_ms"] > 0
    assert adaptive["tokens_per_step"] == pytest.approx(1, abs=0.2)

"""The benchmark of drafts runs and records its measurements."""

import pytest

from benchmarks import speculation
from benchmarks.record import load_record


@pytest.mark.slow
def test_drafts_that_are_always_right_are_tokens_without_steps(tmp_path):
    sizes = ["--shape", "tiny", "--batch", "2", "--drafts", "2", "--acceptance", "0,1"]
    sizes += ["--tokens", "8", "--dtype", "float32", "--drafter", "device,host"]
    speculation.main([*sizes, "--folder", str(tmp_path)])
    rows = load_record(tmp_path / "speculation-tiny.json").rows
    ways = [(row["drafter"], row["acceptance"]) for row in rows]
    assert ways == [
        ("none", "none"),
        *[(where, share) for where in ("device", "host") for share in ("0", "1")],
        *[(where, "0, adaptive") for where in ("device", "host")],
    ]
    plain, *drafted, device, host = rows
    assert plain["step_ms"] > 0
    for never, always in (drafted[:2], drafted[2:]):
        assert always["tokens_per_step"] == always["expected_tokens"] == 3
        assert never["tokens_per_step"] == 1
    for adaptive in (device, host):
        assert adaptive["tokens_per_step"] == pytest.approx(1, abs=0.2)

"""The benchmark of rollouts runs both engines and records its measurements."""

import pytest

from benchmarks import rollouts
from benchmarks.record import load_record


@pytest.mark.slow
def test_a_record_has_rollouts_whose_replay_is_exact(tmp_path):
    sizes = ["--shape", "tiny", "--prompts", "3", "--samples", "2", "--length", "8", "--rows", "4"]
    options = ["--rounds", "1", "--cache-bytes", "4194304", "--steps-per-launch", "1,4"]
    rollouts.main([*sizes, *options, "--folder", str(tmp_path)])
    rows = load_record(tmp_path / "rollouts-tiny.json").rows
    ways = [(row["batch_invariant"], row["steps_per_launch"]) for row in rows]
    assert ways == [(False, 1), (False, 4), (True, 1), (True, 4)]
    for row in rows:
        assert row["replay_tokens_that_differ"] == row["compiled_late"] == 0
        assert row["tokens_per_s"] == pytest.approx(48 / row["seconds"])
        assert 0 < row["floor_percent"] < 100

"""The benchmark of batch_invariant runs both forms and records its measurements."""

import pytest

from benchmarks import batch_invariance
from benchmarks.record import load_record


@pytest.mark.slow
def test_a_record_has_both_forms_of_every_batch(tmp_path):
    sizes = ["--shape", "tiny", "--batch", "1,2", "--context", "16", "--new-tokens", "3"]
    batch_invariance.main([*sizes, "--repeats", "1", "--folder", str(tmp_path)])
    rows = load_record(tmp_path / "batch-invariance-tiny.json").rows
    assert [row["batch"] for row in rows] == [1, 2]
    for row in rows:
        for name in ("ms_per_token", "prompt_ms"):
            ratio = row[f"invariant_{name}"] / row[f"default_{name}"]
            assert row[f"{name}_percent"] == pytest.approx(100 * (ratio - 1))

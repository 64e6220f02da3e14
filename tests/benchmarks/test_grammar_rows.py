"""The benchmark of rows with a grammar runs and records its measurements."""

import pytest

from benchmarks import grammar_rows
from benchmarks.record import load_record


@pytest.mark.slow
def test_a_record_compares_tokens_with_and_without_a_grammar(tmp_path):
    sizes = ["--rows", "2", "--constrained", "0,1", "--tokens", "8", "--repeats", "1"]
    grammar_rows.main([*sizes, "--dtype", "float32", "--folder", str(tmp_path)])
    alone, beside = load_record(tmp_path / "grammar-rows.json").rows
    assert (alone["constrained_rows"], beside["constrained_rows"]) == (0, 1)
    assert alone["overhead_percent"] == 0
    assert beside["ms_per_token"] > 0
    assert beside["overhead_percent"] == 100 * (
        beside["ms_per_token"] / beside["ms_per_token_all_free"] - 1
    )
    assert alone["ms_per_token_constrained"] == 0 < beside["ms_per_token_constrained"]
    assert min(alone["timed_tokens"], beside["timed_tokens"]) >= 8

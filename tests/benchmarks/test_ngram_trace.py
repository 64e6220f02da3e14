"""The benchmark of n-gram drafts on edits of code takes functions of this package, and finds equal texts."""

import pytest

from benchmarks import ngram_trace
from benchmarks.record import load_record


def test_a_prompt_is_a_function_and_the_beginning_of_a_copy():
    prompts = ngram_trace.edits(300, 900)
    assert len(prompts) >= 8
    for prompt in prompts:
        code, _, copy = prompt.rpartition("\n\n\n")
        assert 300 <= len(code) <= 900
        assert code.startswith("def ")
        assert code.startswith(copy)


@pytest.mark.slow
def test_a_record_has_the_tokens_per_step_of_each_number_of_drafts(tmp_path):
    sizes = ["--drafts", "0,4", "--tokens", "24", "--most-requests", "3"]
    ngram_trace.main([*sizes, "--folder", str(tmp_path)])
    none, some = load_record(tmp_path / "ngram-trace-default-model.json").rows
    assert (none["drafts"], none["accepted_percent"]) == (0, None)
    assert some["tokens_per_step"] > none["tokens_per_step"]

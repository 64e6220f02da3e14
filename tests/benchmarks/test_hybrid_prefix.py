"""The benchmark of hybrid prefixes on a small model: its counts are those of the traces on any machine."""

import json

import pytest

from benchmarks.hybrid_prefix import main


@pytest.mark.slow
def test_both_parts_are_recorded_and_the_counts_are_the_traces_own(tmp_path):
    """The traces are repeated prompts, without and with outputs kept, and branching prompts."""
    given = "--shape tiny-hybrid --dtype float32 --tokens 768 --repeats 1"
    main([*given.split(), "--folder", str(tmp_path)])

    def rows(name):
        return json.loads((tmp_path / f"{name}.json").read_text())["rows"]

    counts = [(row["trace"], row["computed_tokens"]) for row in rows("hybrid-computed-tokens")]
    assert counts == [("repeated", 1024), ("repeated", 512), ("branching", 2008)]
    assert [row["cached_tokens"] for row in rows("hybrid-first-token")] == [0, 512, 512]


def test_unknown_parts_are_refused_before_anything_is_measured(capsys):
    with pytest.raises(SystemExit):
        main(["--parts", "times,cuonts"])
    assert "--parts must be among times, counts, got cuonts" in capsys.readouterr().err

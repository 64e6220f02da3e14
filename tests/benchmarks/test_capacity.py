"""The capacity table: bytes per token of each cache format, compared with numbers computed by hand."""

import json

import pytest

from benchmarks.capacity import CASES, main, most_sequences
from jaxkv.cache.budget import plan_budget


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    main(["--budget-gib", "100", "--context", "8192", "--folder", str(folder)])
    return {
        row["variant"]: row for row in json.loads((folder / "capacity.json").read_text())["rows"]
    }


def test_bytes_per_token_are_those_of_the_formats(rows):
    """Issue 6: a table of bytes per token for each variant against plain pages of bfloat16."""
    assert rows["pages, bfloat16"]["bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    for name in ("pages, fp8", "pages, int8"):
        assert rows[name]["bytes_per_token"] == 32 * 2 * 8 * (128 + 4)
    assert rows["MLA, bfloat16"]["bytes_per_token"] == (61 * (512 + 64) * 2)
    assert rows["DSA, 656 + 132 bytes"]["bytes_per_token"] == 61 * (656 + 132)
    # 17 pages of the windows, of 64 tokens, and 128 of the layers that see everything.
    gemma = rows["windows of 1024 in 5 of 6 layers"]
    assert gemma["sequence_mib"] == (40 * 17 + 8 * 128) * 64 * 2 * 8 * 256 * 2 / 2**20
    assert all(row["plain_sequences"] <= row["sequences"] for row in rows.values())


def test_one_more_sequence_would_not_fit():
    case = next(case for case in CASES if case.variant.startswith("windows"))
    layout, memory = case.layout(case.specs), 20 * 2**30
    most = most_sequences(layout, memory, 8192, 4096)
    fitting = [
        plan_budget(layout, memory, max_sequences=count, max_tokens=8192, ahead=4096).num_sequences
        for count in (most, most + 1)
    ]
    assert fitting == [most, most]
    assert most_sequences(layout, 2**20, 8192, 4096) == 0

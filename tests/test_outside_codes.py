"""No code in the repository refers to a document outside of it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("jaxkv", "pallas_kernels", "torch_bridge", "benchmarks", "tests", "docs", "examples")
SUFFIXES = {".py", ".md", ".toml", ".yml", ".json"}
CODES = re.compile(
    # A letter and a number, as in a table of requirements.
    r"(?<![\w-])(?:S[1-9]|[ABNRT])-[A-F]?\d{1,2}(?![\w-])"
    # A row or section of such a table.
    r"|\b(?:[Ff]ault|[Rr]eliability)\s+(?:rows?\s+)?[A-F]?\d"
    # The same in the name of a test, and at the beginning of a docstring or comment.
    r"|\btest_[a-z]\d\d_"
    r'|(?:"""|# )[ABDFRS]\d(?=[:,.] | and )'
)


def codes(text):
    return [found[0] for found in CODES.finditer(text)]


def sources():
    """Returns the text files of the repository except this one, which has codes as examples."""
    paths = [*ROOT.glob("*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    return [
        path
        for path in sorted(paths)
        if path.suffix in SUFFIXES and path.is_file() and path.name != Path(__file__).name
    ]


def test_no_code_points_outside_of_the_repository():
    found = {str(path.relative_to(ROOT)): codes(path.read_text("utf-8")) for path in sources()}
    assert len(found) > 500
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        f"# T-{25}: all or nothing",
        f'"""S5-{24}, S5-{25}."""',
        "as R-A1 demands (B-01..B-04)",
        '"""Fault row 24 as a library meets it."""',
        '"""Reliability D1: it recovers."""',
        '"""reliability 2.1: a second release raises."""',
        "def test_b04_a_commit_ends_the_lease():",
        '"""A2: tiny pools."""',
        "# B1 and more",
    ],
)
def test_each_kind_of_code_is_noticed(text):
    assert codes(text)


@pytest.mark.parametrize(
    "text",
    [
        "an RTX A-6000, the model Qwen3-30B-A3B",
        "UTF-8, SHA-256, CVE-2026-0599, gpt-oss, e4m3fn, GPT-2",
        "| B1 ctx1024 | 5.6 us |",
        "def test_h200_programs(): ...",
        "B8 is bound by latency",
        "S = 3",
    ],
)
def test_other_names_with_numbers_are_left_alone(text):
    assert codes(text) == []

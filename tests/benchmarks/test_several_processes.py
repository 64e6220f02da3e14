"""The benchmark of several processes runs every arrangement where there are no GPUs, and notices a death."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_arrangements_give_the_same_tokens_and_a_death_ends_the_other_process():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.several_processes", "--tokens", "6", "--requests", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [report.get("tokens_of_one_gpu") for report in reports] == [True] * 4 + [None]
    assert "process 1 " in reports[-1]["words"]

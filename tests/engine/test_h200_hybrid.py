"""Steps of models with recurrent layers and experts, compiled for an H200 without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DECODE = ("decode_mosaic_gpu", "experts_decode_mosaic_gpu", "delta_decode_mosaic_gpu")
KEEPING = ("keeping_decode_mosaic_gpu", "keeping_prefill_mosaic_gpu")
PREFILL = ("prefill_mosaic_gpu", "experts_prefill_mosaic_gpu", "delta_prefill_mosaic_gpu")


def compiled(names, program="h200_hybrid.py"):
    """Compiles programs in a process of their own and returns the facts about each."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(Path(__file__).with_name(program)), *names]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in found:
        pytest.skip(found["skipped"])
    return found


def assert_in_place(report):
    # States are read and written in place, like pages.
    assert report["backend"] == "gpu"
    assert report["problems"] == []
    assert report["copies"] == []
    assert report["alias_bytes"] == report["cache_bytes"]


def test_a_decode_step_with_states_and_experts_is_one_command_buffer_in_place():
    reports = compiled(DECODE)
    for name in DECODE:
        assert_in_place(reports[name])
        assert reports[name]["command_buffers"] == 1
        assert reports[name]["outside"] == []
    # No expert's matrices are copied: each of the two is more than this.
    assert reports["experts_decode_mosaic_gpu"]["temp_bytes"] < 8 * 2**20


@pytest.mark.slow
def test_steps_that_keep_checkpoints_and_outputs_write_them_where_they_lie():
    """Pending checkpoints and last hidden states cost no copy of a pool and no second graph."""
    reports = compiled(KEEPING)
    for name in KEEPING:
        assert_in_place(reports[name])
        assert reports[name]["command_buffers"] == 1
        assert reports[name]["outside"] == []


@pytest.mark.slow
def test_a_prefill_step_with_states_and_experts_updates_its_cache_in_place():
    reports = compiled(PREFILL)
    for name in PREFILL:
        assert_in_place(reports[name])
        # The delta rule's triangular system is solved by a library, which no command buffer takes.
        whole = name != "delta_prefill_mosaic_gpu"
        assert (reports[name]["command_buffers"] == 1 and not reports[name]["outside"]) is whole

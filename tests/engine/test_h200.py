"""The engine's programs compiled for an H200 without a GPU: launches, copies, donation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.h200 import STORED

CHOOSING = ("decode_drawn", "decode_weighed")
STEPS = ("decode", "decode_best", "decode_64_rows", "decode_32", *CHOOSING, "prefill")
GOOD = (*STEPS, "multi_step", "generate")
BESIDE = ("copy", "readmit")
ODD = ("one_page",)
BAD = ("swapped", "read_late", "scanned")


@pytest.fixture(scope="module")
def reports():
    """Compiles all of them in one process: about 30 seconds on two idle cores."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(Path(__file__).with_name("h200.py")), *GOOD, *BESIDE, *ODD, *BAD]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in found:
        pytest.skip(found["skipped"])
    return found


@pytest.mark.parametrize("name", [*GOOD, *BESIDE])
def test_a_program_updates_its_cache_in_place_on_an_h200(reports, name):
    # Every leaf of the cache is its own output, and no pool is copied.
    report = reports[name]
    assert report["backend"] == "gpu"
    assert report["problems"] == []
    assert report["copies"] == []
    assert report["alias_bytes"] == report["cache_bytes"]


def test_programs_of_our_kernels_have_names_on_disk(reports):
    """A trace holds variables of the code around the kernel. They have no value, and no part in the name."""
    names = {reports[name]["stored_as"] for name in STORED}
    assert len(names) == len(STORED)
    assert all(len(name.rpartition("-")[2]) == 64 for name in names)


def test_a_cache_of_one_page_may_be_swept_by_whoever_reads_it(reports):
    # Reading its only page is reading the pool, which attention without a kernel does in several passes.
    assert reports["one_page"]["problems"] == []
    assert reports["one_page"]["alias_bytes"] == reports["one_page"]["cache_bytes"]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_one_command_buffer(reports, name):
    report = reports[name]
    assert report["command_buffers"] == 1
    assert report["outside"] == []
    assert report["captured"] > 10


def test_the_best_step_writes_attends_and_multiplies_in_kernels_of_ours(reports):
    """Per layer one that writes, one that attends, and of few rows one for each of four products.

    Beside them stand the logits; of more than 64 tokens no other product is a kernel.
    """
    kernels = {
        "decode_best": 6 * 2 + 1,
        "decode_32": 6 * 32 + 1,
        "decode_64_rows": 6 * 2 + 1,
        "prefill": 2 * 2 + 1,
    }
    for name, count in kernels.items():
        assert reports[name]["custom_calls"] == ["mosaic_gpu_v2"] * count
    assert reports["decode"]["custom_calls"] == []


def test_a_layer_takes_few_nodes_of_the_graph(reports):
    """Its six kernels and nothing else: norms, activation and residual stream are parts of the products."""
    step, layers = reports["decode_32"], 32
    per_layer = (step["captured"] - reports["decode_best"]["captured"]) / (layers - 2)
    assert per_layer == 6
    assert step["captured"] - layers * per_layer <= 13


def test_several_steps_are_one_graph_that_is_launched_so_often_without_the_host(reports):
    # One graph prepares, one is a step. The number of turns is known to the host, so it is not read from the device.
    report = reports["multi_step"]
    assert report["command_buffers"] == 2
    assert report["outside"].count("kWhile") == 1
    assert len(report["outside"]) <= 3, report["outside"]
    assert report["turns"] == ["4"]


def test_an_iteration_of_generate_is_one_command_buffer(reports):
    # One for the prompt and one for each iteration; what decides about the next iteration runs on its own.
    report = reports["generate"]
    assert report["command_buffers"] == 2
    assert report["outside"].count("kWhile") == 1
    assert len(report["outside"]) <= 4, report["outside"]


def test_swapped_pools_are_refused_on_an_h200(reports):
    report = reports["swapped"]
    assert report["alias_bytes"] == report["cache_bytes"]
    assert any("comes back in the place of" in problem for problem in report["problems"])
    assert report["copies"]


def test_a_read_that_outlives_the_write_is_refused_on_an_h200(reports):
    assert any("is copied by" in problem for problem in reports["read_late"]["problems"])


def test_layers_in_a_scan_are_refused_and_leave_no_command_buffer(reports):
    report = reports["scanned"]
    assert any("comes back as a new array" in problem for problem in report["problems"])
    assert report["command_buffers"] == 0
    assert "kWhile" in report["outside"]

"""What XLA makes of the engine's programs on an H200, seen without a GPU: launches, copies, donation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = ("decode", "decode_best", "decode_64_rows", "decode_32", "prefill", "generate")
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
    # T-06, T-08
    report = reports[name]
    assert report["backend"] == "gpu"
    assert report["problems"] == []
    assert report["copies"] == []
    assert report["alias_bytes"] == report["cache_bytes"]


def test_programs_of_our_kernels_have_names_on_disk(reports):
    """S3-14: a kernel's trace holds variables of what is around it, which have no values to be told apart by."""
    names = {reports[name]["stored_as"] for name in ("decode", "decode_best", "prefill")}
    assert len(names) == 3
    assert all(len(name.rpartition("-")[2]) == 64 for name in names)


def test_a_cache_of_one_page_may_be_swept_by_whoever_reads_it(reports):
    # Reading its only page is reading the pool, which attention without a kernel does in several passes.
    assert reports["one_page"]["problems"] == []
    assert reports["one_page"]["alias_bytes"] == reports["one_page"]["cache_bytes"]


@pytest.mark.parametrize("name", [name for name in GOOD if name != "generate"])
def test_a_step_is_one_command_buffer(reports, name):
    # T-15
    report = reports[name]
    assert report["command_buffers"] == 1
    assert report["outside"] == []
    assert report["captured"] > 20


def test_the_best_step_writes_and_attends_in_one_kernel_each_per_layer(reports):
    for name, layers in {
        "decode_best": 2,
        "decode_64_rows": 2,
        "decode_32": 32,
        "prefill": 2,
    }.items():
        assert reports[name]["custom_calls"] == ["mosaic_gpu_v2"] * 2 * layers
    assert reports["decode"]["custom_calls"] == []


def test_a_layer_takes_few_nodes_of_the_graph(reports):
    """Four products (two of them with a sum over parts), two kernels of ours, two norms, an activation."""
    step, layers = reports["decode_32"], 32
    per_layer = (step["captured"] - reports["decode_best"]["captured"]) / (layers - 2)
    assert per_layer <= 11
    assert step["captured"] - layers * per_layer <= 12


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

"""What is made of compute-sanitizer's words, without a GPU."""

import jax
import pytest

from pallas_kernels.workbench import sanitize
from pallas_kernels.workbench.op_benchmark import load_cases
from pallas_kernels.workbench.sanitize import Outcome, hostile, read_outcome

RAN = "case of page_write: Case(...)\ncase of page_write: Case(...)\nran all cases\n"
CLEAN = f"========= COMPUTE-SANITIZER\n{RAN}========= ERROR SUMMARY: 0 errors\n"
OURS = f"""========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at page_write+0x2f0
=========     by thread (0,0,0) in block (3,0,0)
=========     Access at 0x7f1c is out of bounds
{RAN}========= ERROR SUMMARY: 1 error
"""
THEIRS = f"""========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at input_reduce_fusion+0x70
=========     by thread (0,0,0) in block (0,0,0)
========= Uninitialized __global__ memory read of size 4 bytes
=========     at input_reduce_fusion+0x70
{RAN}========= ERROR SUMMARY: 2 errors
"""


def read(text, status=0):
    return read_outcome("page_write", "memcheck", text, status)


def test_a_clean_run_counts_its_cases():
    assert read(CLEAN) == Outcome("page_write", "memcheck", 2, 0)
    assert read(CLEAN).is_clean


@pytest.mark.parametrize(
    ("text", "findings", "kernel"), [(OURS, 1, "page_write"), (THEIRS, 2, "input_reduce_fusion")]
)
def test_a_finding_is_told_with_its_kernel_and_is_not_clean(text, findings, kernel):
    """In XLA's kernels too: they read what ours left unwritten."""
    assert (read(text).findings, read(text).kernels) == (findings, (kernel,))
    assert not read(text).is_clean


def test_findings_that_were_not_printed_and_those_without_a_kernel_count():
    assert read(THEIRS.replace("2 errors", "7 errors")).findings == 7
    text = CLEAN.replace(RAN, f"========= Program hit cudaErrorLaunchFailure\n{RAN}")
    assert not read(text.replace("0 errors", "1 error")).is_clean


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", 0),
        (CLEAN, 1),
        (CLEAN.replace("ran all cases", "Traceback"), 0),
        ("Segmentation fault", 139),
    ],
)
def test_a_run_that_did_not_end_well_is_not_clean(text, status):
    assert read(text, status).broken or not read(text, status).cases
    assert not read(text, status).is_clean


def test_without_cases_nothing_was_shown():
    assert not read(CLEAN.replace("case of", "no case of").replace("page_write", "")).is_clean


def test_without_the_tool_it_says_where_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    assert sanitize.main([]) == 2
    assert "comes with the CUDA toolkit" in capsys.readouterr().err


@pytest.mark.parametrize(("outcomes", "status"), [((CLEAN, CLEAN), 0), ((CLEAN, OURS), 1)])
def test_the_summary_has_a_line_for_each_op_and_tool(outcomes, status, monkeypatch, capsys):
    texts = dict(zip(("memcheck", "initcheck"), outcomes, strict=True))
    monkeypatch.setattr(sanitize, "find_tool", lambda: "/bin/true")
    monkeypatch.setattr(sanitize, "watch", lambda _, op, tool: read_outcome(op, tool, texts[tool]))
    assert sanitize.main(["page_write"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "2 cases" in lines[0]


@pytest.mark.parametrize("op", sanitize.OPS)
def test_every_op_has_hostile_cases_of_its_own_kind(op):
    small = [case for case in load_cases(op).values() if case.ci]
    for case in small:
        assert {type(each) for each in hostile(case)} == {type(case)}
        assert [each.inputs(1, "bfloat16") for each in hostile(case)][1:]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what happens without a GPU")
def test_on_a_cpu_a_run_finds_no_case_that_the_kernel_takes(capsys):
    sanitize.main(["--run", "page_write"])
    assert capsys.readouterr().out == "ran all cases\n"

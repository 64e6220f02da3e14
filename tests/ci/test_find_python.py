"""The search for a Python interpreter in the set-up, with made-up folders of interpreters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIND_PYTHON = Path(__file__).parents[2] / ".ci" / "find-python"
THIS_PYTHON = os.path.realpath(sys.executable)


def find(tmp_path, **environment):
    variables = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)} | environment
    return subprocess.run(
        ["/bin/sh", str(FIND_PYTHON)], env=variables, capture_output=True, text=True, check=False
    )


def write_program(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_a_shim_that_runs_nothing_is_passed_over_for_a_python_that_runs(tmp_path):
    write_program(
        tmp_path / "bin" / "python3.12", "echo 'python3.12: command not found' >&2; exit 127"
    )
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    assert find(tmp_path).stdout.strip() == THIS_PYTHON


def test_an_older_python_is_passed_over(tmp_path):
    write_program(tmp_path / "bin" / "python3", "exit 0")
    assert find(tmp_path).returncode == 2


@pytest.mark.parametrize("root", ["PYENV_ROOT", "HOME"])
def test_a_version_of_pyenv_serves_where_the_path_has_none(tmp_path, root):
    pyenv = tmp_path / (".pyenv" if root == "HOME" else "elsewhere")
    python = pyenv / "versions" / "3.12.99" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    environment = {} if root == "HOME" else {"PYENV_ROOT": str(pyenv)}
    assert find(tmp_path, **environment).stdout.strip() == THIS_PYTHON


def test_uv_is_asked_last(tmp_path):
    write_program(tmp_path / "bin" / "uv", f"echo {sys.executable}")
    assert find(tmp_path).stdout.strip() == sys.executable


def test_no_python_at_all_is_one_line_and_exit_code_2(tmp_path):
    for environment in ({}, {"PYTHON": "/nowhere/python3.12"}):
        done = find(tmp_path, **environment)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("error: no Python 3.12 or newer")
        assert done.stderr.count("\n") == 1

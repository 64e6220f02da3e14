"""Runs a script that compiles kernels for an H200 that is not there, and returns what it found of each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def reports_of(script, *arguments):
    """The script, by its path from here, prints its reports as JSON on its last line, or why it cannot compile here."""
    root = Path(__file__).parents[3]
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    # Compiled as users compile, which the other tests are not.
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in found:
        pytest.skip(found["skipped"])
    return found

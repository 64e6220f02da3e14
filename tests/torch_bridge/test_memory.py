"""JAX's and torch's allocators in one process, in either order of import, and the examples of the bridge."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_bridge import memory

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
EITHER_ORDER = """
import {first}
import {second}
import jax.numpy as jnp, torch
from torch_bridge import from_torch, memory, to_torch
memory.share_memory(0.5)
import os
assert os.environ[memory.PREALLOCATE] == "false" and os.environ[memory.FRACTION] == "0.5000"
assert float(from_torch(torch.ones(64)).sum()) == float(to_torch(jnp.ones(64)).sum()) == 64
try:
    memory.share_memory(0.5)
except RuntimeError as error:
    assert "has initialised its devices" in str(error)
    print("refused")
"""


def run(*command):
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("first", ["jax", "torch"])
def test_either_may_be_imported_first(first):
    code = EITHER_ORDER.format(first=first, second="torch" if first == "jax" else "jax")
    done = run("-c", code)
    assert done.stdout == "refused\n", done.stderr


@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.6, 0.6), (1.0, None), (0.96, None)])
def test_shares_that_do_not_fit_are_refused(shares):
    with pytest.raises(ValueError, match="add up to at most 1"):
        memory.share_memory(*shares)


def test_the_example_computes_the_prefix_once():
    done = run("-m", "torch_bridge.examples.chat_over_one_prefix")
    assert done.returncode == 0, done.stderr
    assert "prompt of 77 tokens: 0 reused, 88 computed" in done.stdout
    assert "prompt of 79 tokens: 64 reused, 26 computed" in done.stdout
    assert "def __len__(self):\n        return len(self.items)" in done.stdout

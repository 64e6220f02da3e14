"""JAX and torch in one process, from either order of import to its end, and the examples of the bridge."""

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

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import gqa, place
from torch_bridge.sharing.kept_lease import KeptLease
layout = group_layers(place([gqa(2, 16, dtype="float32", page_size=4)]))
kept = KeptLease(CacheOwner(layout, {{"gqa": 4}}))
kept.put_down(kept.borrow())
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


@pytest.fixture(scope="module", params=["jax", "torch"])
def ended(request):
    """A process that imported this first and ended with a lease at rest; each takes seconds of imports."""
    second = {"jax": "torch", "torch": "jax"}[request.param]
    return run("-c", EITHER_ORDER.format(first=request.param, second=second))


@pytest.mark.slow
def test_either_may_be_imported_first(ended):
    assert ended.stdout == "refused\n", ended.stderr


@pytest.mark.slow
def test_python_may_end_while_a_lease_rests(ended):
    assert ended.returncode == 0, ended.stderr
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.6, 0.6), (1.0, None), (0.96, None)])
def test_shares_that_do_not_fit_are_refused(shares):
    with pytest.raises(ValueError, match="add up to at most 1"):
        memory.share_memory(*shares)


@pytest.mark.slow
def test_the_example_computes_the_prefix_once():
    done = run("-m", "torch_bridge.examples.chat_over_one_prefix")
    assert done.returncode == 0, done.stderr
    assert "prompt of 77 tokens: 0 reused, 88 computed" in done.stdout
    assert "prompt of 79 tokens: 64 reused, 26 computed" in done.stdout
    assert "def __len__(self):\n        return len(self.items)" in done.stdout

"""Kernels that another process lowers for an H200 are those that this process would have lowered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels.device import NEWEST_JAX

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        jax.__version_info__[:2] > NEWEST_JAX, reason="the kernels refuse this JAX; why_not says so"
    ),
]
PROGRAMS = (
    *("decode_drawn", "prefill", "prefill_invariant", "hybrid_prefill_mosaic_gpu"),
    *("latent_decode_mosaic_gpu", "latent_sparse_prefill_records_mosaic_gpu"),
    "windows_gpt_oss_decode",
)
KERNELS = {
    *("paged_attention", "ragged_attention", "latent_attention", "sparse_attention", "ssd_decays"),
    *("skinny_matmul_of_argument", "skinny_matmul_many_rows_of_argument", "grouped_matmul"),
    *("rotary_write", "page_write", "causal_conv", "ssd_scan", "row_factors"),
    *("row_topk", "group_rows", "grouped_matmul_visits"),
}


def test_another_process_lowers_the_same_kernels():
    root = Path(__file__).parents[2]
    command = [sys.executable, str(Path(__file__).with_name("h200_helpers.py")), *PROGRAMS]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in found:
        pytest.skip(found["skipped"])
    kernels = [tuple(kernel) for program in found.values() for kernel in program]
    assert {name for name, _ in kernels} == KERNELS
    assert [name for name, is_same in kernels if not is_same] == []

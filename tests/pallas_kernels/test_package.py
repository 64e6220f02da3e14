"""The package's front: ops are functions, whatever was imported before, and JAX comes with the first one."""

import subprocess
import sys

import numpy as np
import pytest

from pallas_kernels.causal_conv import cases as causal_conv_cases
from pallas_kernels.delta_scan import cases as delta_scan_cases
from pallas_kernels.delta_update import cases as delta_update_cases
from pallas_kernels.grouped_matmul import cases as grouped_matmul_cases
from pallas_kernels.latent_attention import cases as latent_attention_cases
from pallas_kernels.page_write import cases as page_write_cases
from pallas_kernels.paged_attention import cases as paged_attention_cases
from pallas_kernels.ragged_attention import cases as ragged_attention_cases
from pallas_kernels.rotary_write import cases as rotary_write_cases
from pallas_kernels.ssd_scan import cases as ssd_scan_cases
from pallas_kernels.ssd_update import cases as ssd_update_cases

ALL = (
    paged_attention_cases,
    ragged_attention_cases,
    latent_attention_cases,
    page_write_cases,
    rotary_write_cases,
    causal_conv_cases,
    delta_scan_cases,
    delta_update_cases,
    grouped_matmul_cases,
    ssd_scan_cases,
    ssd_update_cases,
)
ALL_CASES = [case for cases in ALL for case in cases.CASES]


def python(program):
    return subprocess.run([sys.executable, "-c", program], check=False).returncode


def test_host_files_do_not_import_jax():
    assert not python(
        "import sys, pallas_kernels.dispatch, pallas_kernels.paged_attention.cases\n"
        "sys.exit('jax' in sys.modules)"
    )


def test_an_op_is_its_function_even_after_its_files_were_imported():
    assert not python(
        "import sys\n"
        "from pallas_kernels.paged_attention import xla\n"
        "import pallas_kernels.page_write.cases\n"
        "from pallas_kernels import page_write, paged_attention, ragged_attention, rotary_write\n"
        "from pallas_kernels import causal_conv, ssd_scan, ssd_update\n"
        "ops = page_write, paged_attention, ragged_attention, rotary_write\n"
        "ops += causal_conv, ssd_scan, ssd_update\n"
        "sys.exit(not all(map(callable, ops)))"
    )


def test_an_unknown_name_is_an_attribute_error():
    import pallas_kernels

    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        pallas_kernels.flash


def test_the_numbers_of_a_case_are_those_of_its_shape():
    """B64 at 4096 reads 1.07 GB of keys and values, the floor of 250 us at 4.3 TB/s."""
    by_name = {case.name: case for case in paged_attention_cases.CASES}
    big = by_name["llama-b64-ctx4096"]
    assert big.bytes_moved() == 64 * (4096 * 8 + 32) * 128 * 2 * 2
    assert big.flops() == 4 * 64 * 4096 * 32 * 128
    window = by_name["llama-b64-ctx8192-window1024"]
    assert window.flops() == 4 * 64 * 1024 * 32 * 128
    prefill = next(case for case in rotary_write_cases.CASES if case.name == "llama-prefill-8192")
    assert prefill.bytes_moved() == 8192 * (2 * 48 * 128 * 2 + 2 * 64 * 4)
    step = next(case for case in ssd_update_cases.CASES if case.name == "b64")
    columns, state = 2 * 8192 + 2 * 8 * 128 + 128, 8192 * 128 * 4
    assert step.bytes_moved() == 64 * (columns * 2 + 2 * state)
    latent = next(case for case in latent_attention_cases.CASES if case.name == "v3-b64-ctx4096")
    assert latent.bytes_moved() == 64 * (4096 * 576 + 128 * (576 + 512)) * 2
    assert latent.flops() == 2 * 64 * 4096 * 128 * (576 + 512)
    small = next(case for case in grouped_matmul_cases.CASES if case.name == "ragged")
    assert small.bytes_moved() == (4 * 128 * 128 + 29 * (128 + 128)) * 2
    assert small.flops() == 2 * 29 * 128 * 128
    prompt = next(case for case in ragged_attention_cases.CASES if case.name == "one-prompt")
    assert prompt.flops() == 4 * (37 * 38 // 2) * 4 * 16


def test_cases_of_an_op_have_names_of_their_own_and_repeat_with_their_seed():
    for cases in ALL:
        names = [case.name for case in cases.CASES]
        assert len(set(names)) == len(names)
        first, again = cases.CASES[0].inputs(3, "float32"), cases.CASES[0].inputs(3, "float32")
        for one, other in zip(first.values(), again.values(), strict=True):
            np.testing.assert_equal(one, other)


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.ci], ids=lambda c: c.name)
def test_cases_are_frozen_and_hashable(case):
    assert hash(case) is not None

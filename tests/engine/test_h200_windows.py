"""Steps of models with windows, soft caps and sinks, compiled for an H200 without a GPU."""

import pytest

from tests.engine.test_h200_hybrid import assert_in_place, compiled

DECODE, PREFILL = ("gemma_decode", "gpt_oss_decode"), ("gemma_prefill", "gpt_oss_prefill")
# A write and an attention in each of two layers, and the logits; of few tokens also the dense products of a layer, and
# of any number the two products of its experts.
KERNELS = {"gemma_decode": 13, "gpt_oss_decode": 13, "gemma_prefill": 5, "gpt_oss_prefill": 9}


@pytest.mark.parametrize("names", [DECODE, pytest.param(PREFILL, marks=pytest.mark.slow)])
def test_a_step_with_windows_is_one_command_buffer_in_place_of_our_kernels(names):
    """Nothing is left outside the graph, so the host does not translate slots between layers."""
    reports = compiled(names, "h200_windows.py")
    for name in names:
        assert_in_place(reports[name])
        assert reports[name]["command_buffers"] == 1
        assert reports[name]["outside"] == []
        assert reports[name]["custom_calls"].count("mosaic_gpu_v2") == KERNELS[name]

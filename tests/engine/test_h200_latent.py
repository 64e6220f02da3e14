"""Steps of models with latent attention, compiled for an H200 without a GPU."""

import pytest

from tests.engine.test_h200_hybrid import assert_in_place, compiled

MORE = (
    "expanded_mosaic_gpu",
    "absorbed_mosaic_gpu",
    "sparse_decode_records_mosaic_gpu",
    "decode_one_mosaic_gpu",
    "sparse_decode_plain_mosaic_gpu",
    "sparse_prefill_records_mosaic_gpu",
    "sparse_expanded_records_mosaic_gpu",
)


def assert_one_graph_in_place(names):
    # Latents, records and index keys are written in place, and a step is one graph.
    reports = compiled(names, "h200_latent.py")
    for name in names:
        assert_in_place(reports[name])
        assert reports[name]["command_buffers"] == 1, name
        assert reports[name]["outside"] == [], name


def test_a_decode_step_over_latents_is_one_command_buffer_in_place():
    assert_one_graph_in_place(["decode_mosaic_gpu"])


@pytest.mark.slow
def test_further_steps_over_latents_are_one_command_buffer_in_place():
    assert_one_graph_in_place(MORE)

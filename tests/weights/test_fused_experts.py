"""Transformers 5 saves experts one by one, or fused as it has them in memory; both give the same parameters."""

import jax
import numpy as np
import pytest

from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import build_model, load_config, load_params

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3-moe", "granite-moe", "glm4-moe", "minimax-m2", "ernie4.5-moe"]
)
def test_fused_experts_give_the_parameters_of_single_ones(name, tmp_path):
    theirs = cases.CASES[name].build()
    read = []
    for folder, original in ((tmp_path / "single", True), (tmp_path / "fused", False)):
        theirs.save_pretrained(folder, save_original_format=original)
        model = build_model(load_config(folder))
        read.append(load_params(folder, model, dtype="float32", progress=False))
    jax.tree.map(np.testing.assert_array_equal, *read)


def test_a_missing_expert_is_named_and_not_its_fused_form(tmp_path):
    from safetensors.numpy import load_file, save_file

    theirs = cases.CASES["mixtral"].build()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, file)
    with pytest.raises(BadCheckpoint, match=r"lacks 'model\.layers\.1\..*experts\.3\.w2\.weight'"):
        load_params(tmp_path, build_model(load_config(tmp_path)), dtype="float32", progress=False)

"""Weights that several layers share are read once, also from a checkpoint that repeats them for each layer."""

import jax
import numpy as np
import pytest

from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import build_model, load_config, load_params

pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.numpy")
hybrid_cases = pytest.importorskip("tests.models.families.hybrid_cases")

pytestmark = pytest.mark.torch

# The owner of layer 3 is layer 1.
OWNER, OTHER = "model.layers.1.shared_transformer.", "model.layers.3.shared_transformer."


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a tiny model, and the tensors of its file."""
    folder = tmp_path_factory.mktemp("zamba2")
    hybrid_cases.CASES["zamba2"].build().save_pretrained(folder)
    return folder, safetensors.load_file(folder / "model.safetensors")


@pytest.fixture
def load(saved, tmp_path):
    """Returns the parameters that are read from the directory with other tensors."""
    folder, _ = saved
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())

    def read(tensors):
        safetensors.save_file(tensors, tmp_path / "model.safetensors")
        model = build_model(load_config(tmp_path))
        return load_params(tmp_path, model, dtype="float32", progress=False)

    return read


def repeated(tensors):
    return {
        OTHER + name.removeprefix(OWNER): value
        for name, value in tensors.items()
        if name.startswith(OWNER)
    }


def test_a_checkpoint_that_repeats_shared_weights_gives_the_same_parameters(saved, load):
    _, tensors = saved
    assert len(repeated(tensors)) == 24
    once = load(tensors)
    jax.tree.map(np.testing.assert_array_equal, load(tensors | repeated(tensors)), once)
    assert sum(leaf.size for leaf in jax.tree.leaves(once)) == sum(
        value.size for value in tensors.values()
    )


@pytest.mark.parametrize(
    "end", ["self_attn.k_proj.weight", "feed_forward.gate_up_proj_adapter_list.2.1.weight"]
)
def test_a_repeated_weight_that_differs_is_refused(saved, load, end):
    _, tensors = saved
    more = repeated(tensors)
    more[OTHER + end] = more[OTHER + end] + 1
    with pytest.raises(BadCheckpoint, match=f"layers.3.*{end}' differs from '.*layers.1.*{end}'"):
        load(tensors | more)


def test_a_missing_shared_weight_is_named_as_the_owners(saved, load):
    _, tensors = saved
    rest = {
        name: value for name, value in tensors.items() if name != f"{OWNER}self_attn.o_proj.weight"
    }
    with pytest.raises(BadCheckpoint, match=r"lacks 'model\.layers\.1\.shared_transformer.*o_proj"):
        load(rest)

"""Every family has weights that requests may add adapters to, made of tensors whose rows alone are moved."""

from pathlib import Path

import numpy as np
import pytest

from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import build_model, load_config, rules_for
from jaxkv.weights.lora import Adapter
from jaxkv.weights.lora_leaves import LoraLeaves

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
hybrid_cases = pytest.importorskip("tests.models.families.hybrid_cases")
latent_cases = pytest.importorskip("tests.models.families.latent_cases")

pytestmark = pytest.mark.torch

CASES = cases.CASES | hybrid_cases.CASES | latent_cases.CASES
RANK = 3


@pytest.fixture(scope="module", params=CASES)
def leaves(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    CASES[request.param].config().save_pretrained(folder)
    config = load_config(folder)
    return LoraLeaves(build_model(config), rules_for(config), RANK, "float32")


def test_factors_of_weights_that_a_model_ignores_are_left_out(tmp_path):
    """Gemma 4's layers that share keys have none of their own, and adapters may have factors of them."""
    CASES["gemma4-e2b"].config().save_pretrained(tmp_path)
    config = load_config(tmp_path)
    leaves = LoraLeaves(build_model(config), rules_for(config), RANK, "float32")
    shared = next(at for at in range(config.num_layers) if config.key_owner(at) != at)
    own, unused = (f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (0, shared))
    width, rows = config.hidden_size, config.kv_heads * config.head_dim
    low = Adapter(np.ones((2, width), np.float32), np.ones((rows, 2), np.float32), 1.0)
    assert list(leaves.factors({own: low, unused: low}, tmp_path)) == ["layers.0.qkv"]
    with pytest.raises(BadCheckpoint, match="cannot add adapters"):
        leaves.factors({unused.replace("k_proj", "x_proj"): low}, tmp_path)


def test_a_family_has_leaves_for_adapters_and_a_rank_for_each_of_their_tensors(leaves):
    assert leaves.sizes
    for path, sizes in leaves.sizes.items():
        assert sizes.rank == RANK * len(leaves._recipes[path].sources)
    assert not leaves.factors({}, Path("folder"))

"""Every family has weights that requests may add adapters to, made of tensors whose rows alone are moved."""

from pathlib import Path

import pytest

from jaxkv.models.registry import build_model, load_config, rules_for
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


def test_a_family_has_leaves_for_adapters_and_a_rank_for_each_of_their_tensors(leaves):
    assert leaves.sizes
    for path, sizes in leaves.sizes.items():
        assert sizes.rank == RANK * len(leaves._recipes[path].sources)
    assert not leaves.factors({}, Path("folder"))

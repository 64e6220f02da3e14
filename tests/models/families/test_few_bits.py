"""Families whose projections and experts are rounded to 8 and 4 bits compute what the rounded weights mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.registry import build_model, load_config, load_params
from jaxkv.weights.quantised.weight_forms import is_few_bits
from tests.models.driver import Driver

pytest.importorskip("torch")
cases = pytest.importorskip("tests.models.families.cases")
hybrid_cases = pytest.importorskip("tests.models.families.hybrid_cases")
latent_cases = pytest.importorskip("tests.models.families.latent_cases")

pytestmark = pytest.mark.torch

ALL = cases.CASES | hybrid_cases.CASES | latent_cases.CASES


def meant(params):
    """Returns the plain float32 parameters that some in few bits stand for."""
    return jax.tree.map(
        lambda leaf: leaf.widened(jnp.float32) if is_few_bits(leaf) else leaf,
        params,
        is_leaf=is_few_bits,
    )


def in_few_bits(params):
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_few_bits)
    return {
        jax.tree_util.keystr(path[-1:], simple=True): (leaf.code, leaf.rounds_rows)
        for path, leaf in leaves
        if is_few_bits(leaf)
    }


@pytest.mark.parametrize(
    ("family", "quantization", "names"),
    [
        pytest.param("llama", "int4", {"qkv", "o", "gate_up", "down"}, marks=pytest.mark.slow),
        pytest.param("llama", "int8", {"qkv", "o", "gate_up", "down"}, marks=pytest.mark.slow),
        ("qwen3-moe", "fp8", {"qkv", "o", "gate_up", "down", "experts_up", "experts_down"}),
        pytest.param(
            "qwen3-moe",
            "int4",
            {"qkv", "o", "gate_up", "down", "experts_up", "experts_down"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "v3",
            "int4",
            {"qkv_down", "q_up", "o", "gate_up", "down", "experts_up", "experts_down"}
            | {"shared_up", "shared_down"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "bamba",
            "int8",
            {"qkv", "o", "gate_up", "down", "ssm_in", "ssm_out"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_logits_are_those_of_the_same_weights_in_plain_float32(
    family, quantization, names, tmp_path
):
    case = ALL[family]
    case.build().save_pretrained(tmp_path)
    model = build_model(load_config(tmp_path))
    params = load_params(
        tmp_path, model, dtype="float32", quantization=quantization, progress=False
    )
    code = {"fp8": "float8_e4m3fn"}.get(quantization, quantization)
    # Products of experts round no activations.
    rounds = {name: quantization == "fp8" and "experts" not in name for name in names}
    assert in_few_bits(params) == {name: (code, rounds[name]) for name in names}
    plain = load_params(tmp_path, model, dtype="float32", progress=False)
    assert jax.tree.structure(plain) == jax.tree.structure(meant(params))

    tokens = case.prompt(24)
    ours, theirs, other = (Driver(model, one) for one in (params, meant(params), plain))
    for run in ("prefill", "decode"):
        got, wanted, unrounded = (
            np.concatenate(one.prefill([tokens])) if run == "prefill" else one.decode(tokens[:1])
            for one in (ours, theirs, other)
        )
        np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())
        # What is compared was rounded.
        assert np.abs(wanted - unrounded).max() > 1e-3 * np.abs(wanted).max()

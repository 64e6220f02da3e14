"""Activations are rounded to fp8 where a checkpoint or `quantization` says so, and nowhere else."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv.models.registry import (
    build_model,
    convert_checkpoint,
    expected_params,
    load_config,
    load_params,
)
from jaxkv.runner.param_types import ParamTypes
from jaxkv.runner.weights_checksum import digest_of, leaf_checksums
from jaxkv.weights.quantised.weight_forms import is_few_bits, weight_forms
from pallas_kernels import skinny_matmul
from tests.models.driver import Driver
from tests.one_layer import one_layer_model
from tests.pallas_kernels.few_bits import rounded_rows
from tests.weights.quantised.definitions import FILES
from tests.weights.quantised.test_formats import in_few_bits, opened, weight_of


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def converted(plain):
    folder = plain.with_name("converted")
    convert_checkpoint(plain, folder, quantization="fp8")
    return folder


def load(folder, dtype="bfloat16", quantization=None):
    model = build_model(load_config(folder))
    params = load_params(folder, model, dtype=dtype, quantization=quantization, progress=False)
    return model, params


@pytest.fixture(scope="module")
def rounded(plain):
    """A model, and its parameters of the plain checkpoint rounded to fp8."""
    return load(plain, quantization="fp8")


def changed(params, change):
    """Returns parameters in which `change` has replaced those in few bits."""
    return jax.tree.map(
        lambda leaf: change(leaf) if is_few_bits(leaf) else leaf, params, is_leaf=is_few_bits
    )


def exactly(leaf):
    return replace(leaf, rounds_rows=False)


def rounding(params):
    """Returns whether each parameter in few bits has activations rounded."""
    leaves = jax.tree.leaves(params, is_leaf=is_few_bits)
    return [leaf.rounds_rows for leaf in leaves if is_few_bits(leaf)]


def test_forms_tell_whether_activations_are_rounded(rounded):
    _, params = rounded
    form = "float8_e4m3fn per row"
    assert f"{form}, activations rounded" in weight_forms(params)
    assert form in weight_forms(changed(params, exactly))


def test_a_checksum_of_weights_tells_whether_activations_are_rounded(rounded):
    """So saved prefixes of the other kind are refused. One matrix is enough."""
    params = {"down": rounded[1]["layers"][0]["down"]}
    sums = np.asarray(leaf_checksums(params))
    digest = digest_of(params, sums)
    assert digest == digest_of(params, sums) != digest_of(changed(params, exactly), sums)


def assert_expected(folder, params, model, quantization, *, rounds):
    types = expected_params(folder, model, dtype="bfloat16", quantization=quantization)
    assert jax.tree.structure(types) == jax.tree.structure(params)
    assert rounding(params) == [rounds] * 4
    drawn = model.init_params_like(jax.random.key(0), types)
    assert jax.tree.structure(drawn) == jax.tree.structure(params)


@pytest.mark.parametrize(
    ("quantization", "rounds"),
    [("fp8", True), ("int8", False), pytest.param("int4", False, marks=pytest.mark.slow)],
)
def test_a_plain_checkpoint_rounded_to_fp8_has_activations_rounded_too(plain, quantization, rounds):
    model, params = load(plain, quantization=quantization)
    assert_expected(plain, params, model, quantization, rounds=rounds)


@pytest.mark.parametrize(
    ("activations", "rounds"),
    [
        # As it was written, with one scale for the matrix, and weights alone.
        ({}, True),
        ({"strategy": "tensor", "dynamic": False}, True),
        (None, False),
    ],
)
def test_a_checkpoint_in_fp8_has_activations_rounded_if_it_says_so(
    converted, tmp_path, activations, rounds
):
    shutil.copytree(converted, tmp_path, dirs_exist_ok=True)
    said = json.loads((tmp_path / "config.json").read_text())
    group = said["quantization_config"]["config_groups"]["group_0"]
    written = group["input_activations"]
    group["input_activations"] = None if activations is None else written | activations
    (tmp_path / "config.json").write_text(json.dumps(said))
    model, params = load(tmp_path)
    assert_expected(tmp_path, params, model, None, rounds=rounds)


def test_a_checkpoint_of_a_plain_one_rounds_what_rounding_it_at_the_start_rounds(
    rounded, converted
):
    _, params = load(converted)
    _, wanted = rounded
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_parameters_that_round_activations_do_not_replace_those_that_do_not(rounded):
    _, params = rounded
    ParamTypes(params).accept(params)
    with pytest.raises(ValueError, match=r"its weights in 8 or 4 bits, are of other forms\. Give"):
        ParamTypes(params).accept(changed(params, exactly))


@pytest.mark.parametrize("name", FILES)
def test_e4m3_with_one_scale_per_row_is_multiplied_by_rounded_rows(tmp_path, kit, name):
    file = FILES[name]
    with opened(tmp_path, kit, file) as stored:
        weight = weight_of(stored, file)
        few = in_few_bits(weight)
        mixed = in_few_bits(weight, replace(weight, rounds_rows=False))
    if name not in ("fp8-matrix", "fp8-matrix-1", "fp8-row", "fp8-row-1"):
        assert isinstance(few, str) or not few.rounds_rows
        return
    assert few.rounds_rows
    assert not mixed.rounds_rows
    # Sixteen times side by side: rows that are no multiple of 128 columns are not rounded.
    few = replace(few, codes=jnp.tile(few.codes, 16))
    weights = np.tile(file.means.astype(np.float64), 16)
    assert weights.shape[1] % 128 == 0
    x = np.random.default_rng(1).normal(size=(70, weights.shape[1])).astype(ml_dtypes.bfloat16)
    found = np.asarray(skinny_matmul(few, x, result="float32"), np.float64)
    rows = rounded_rows(x)
    error = np.abs(found - rows @ weights.T)
    assert np.all(error <= 1e-6 * (np.abs(rows) @ np.abs(weights).T))


def logits(model, params, tokens, dtype, step_tokens):
    driver = Driver(model, params, cache_dtype=dtype, step_tokens=step_tokens)
    return np.concatenate(driver.prefill([tokens])).astype(np.float32)


def test_a_model_in_float32_computes_what_its_weights_mean(plain):
    model, params = load(plain, "float32", "fp8")
    assert all(rounding(params))
    tokens = list(range(5, 75))
    meant = changed(params, lambda leaf: leaf.widened(jnp.float32))
    got, wanted = (logits(model, one, tokens, "float32", 128) for one in (params, meant))
    np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max())


# Few rows, and many under the fixed order of sums, are multiplied exactly in test_skinny_matmul.py.
@pytest.mark.parametrize(
    ("step_tokens", "batch_invariant", "rounds"),
    [
        (128, False, True),
        pytest.param(64, False, False, marks=pytest.mark.slow),
        pytest.param(128, True, False, marks=pytest.mark.slow),
    ],
)
def test_a_model_in_16_bits_rounds_activations_of_prompts_alone(
    rounded, step_tokens, batch_invariant, rounds
):
    model, params = rounded
    model = replace(model, batch_invariant=batch_invariant)
    tokens = list(range(5, 65))
    given = (params, changed(params, exactly))
    got, unrounded = (logits(model, one, tokens, "bfloat16", step_tokens) for one in given)
    assert np.array_equal(got, unrounded) != rounds
    np.testing.assert_allclose(got, unrounded, atol=0.1 * np.abs(unrounded).max())

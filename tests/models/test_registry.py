"""`load_config`, `build_model` and `load_params` turn a model directory into the arguments of `jaxkv.generate`."""

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import default_model
from jaxkv.models.registry import build_model, load_config, load_params


def test_a_directory_gives_the_parameters_of_its_checkpoint_and_its_model():
    params, model = jaxkv.load_model(default_model.path(), dtype="float32")
    config = load_config(default_model.path())
    assert model == build_model(config)
    wanted = load_params(default_model.path(), model, dtype="float32", progress=False)
    jax.tree.map(np.testing.assert_array_equal, params, wanted)


def test_the_dtype_is_that_of_the_checkpoint_unless_another_is_asked_for():
    params, model = jaxkv.load_model()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {model.config.dtype}
    params, _ = jaxkv.load_model(dtype="fp16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float16"}
    with pytest.raises(ValueError, match=r"one of auto, float32.* got 'fp8'"):
        jaxkv.load_model(dtype="fp8")


def test_the_implementation_is_that_of_the_model():
    _, model = jaxkv.load_model(implementation="xla")
    assert model.implementation == "xla"

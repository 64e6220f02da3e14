"""A traced program copies weights early if they are its arguments, and not otherwise."""

import jax
import jax.numpy as jnp
import pytest

from jaxkv.programs.lowering import Lowering, trace
from pallas_kernels import device, skinny_matmul
from pallas_kernels.mosaic import jax_versions

X = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
WEIGHT = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Pretends that JAX compiles for an H200; nothing may run then."""
    monkeypatch.setattr(device, "gpu_arch", lambda: device.HOPPER)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    monkeypatch.setattr(jax_versions, "OVERLAPS_LAUNCHES", True)


def multiply(weight, x):
    return skinny_matmul(weight, x, implementation="mosaic_gpu")


def is_early(function, *arguments):
    lowering = Lowering(
        lambda first, cache, *rest: (cache, function(first, cache, *rest)), arguments
    )
    return "skinny_matmul_of_argument" in str(trace("program", lowering).jaxpr)


def test_a_weight_that_is_an_argument_is_copied_early():
    assert is_early(lambda params, cache, x: multiply(params["a"], x), {"a": WEIGHT}, X, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda params, cache, x, _: multiply(params["a"] * 2, x),
        # One of two products is enough: the promise is for a whole program.
        lambda params, cache, x, _: multiply(params["a"].T, multiply(params["a"], x)),
        # The cache is donated, so the program may write it.
        lambda params, cache, x, _: multiply(cache, x),
        # An earlier program may still write an argument that is no parameter.
        lambda params, cache, x, other: multiply(other, x),
    ],
    ids=["computed", "one of two", "donated", "no parameter"],
)
def test_other_weights_are_waited_for(function):
    assert not is_early(function, {"a": WEIGHT}, WEIGHT, X, WEIGHT)

"""A kernel copies a weight early only if it is an argument of the program, wherever in the program the kernel is."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels.argument_weights import argument_weights, computed_weights
from pallas_kernels.mosaic import jax_versions
from tests.early_products import NAME, WEIGHT, X, hopper, multiply  # noqa: F401 - a fixture of all tests

EARLY = {NAME}


def in_a_loop(weight, x):
    return lax.fori_loop(0, 3, lambda _, x: multiply(weight, x), x)


def in_a_while(weight, x):
    return lax.while_loop(lambda x: x[0, 0] < 3, lambda x: multiply(weight, x), x)


def in_a_branch(weight, x):
    return lax.cond(x[0, 0] > 0, multiply, lambda _, x: x, weight, x)


def over_devices(weight, x):
    mesh = jax.make_mesh((1,), ("devices",))
    spec = PartitionSpec()
    return jax.shard_map(
        multiply, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )(weight, x)


PLACES = {
    "at once": multiply,
    "in a function": jax.jit(multiply),
    "in a loop": in_a_loop,
    "in a while": in_a_while,
    "in a branch": in_a_branch,
    "over devices": over_devices,
    "rematerialised": jax.checkpoint(multiply),
}


def stranger(function, *types, given=None):
    with argument_weights():
        traced = jax.make_jaxpr(function)(*types)
    assert NAME in str(traced)
    given = given or [True] * len(traced.jaxpr.invars)
    return computed_weights(traced.jaxpr, given)


@pytest.mark.parametrize("place", PLACES)
def test_an_argument_is_found_to_be_one_in_every_place(place):
    assert stranger(PLACES[place], WEIGHT, X) == set()


@pytest.mark.parametrize("place", PLACES)
def test_a_computed_weight_is_found_in_every_place(place):
    def program(weight, x):
        return PLACES[place](weight * 2, x)

    assert stranger(program, WEIGHT, X) == EARLY


def test_a_donated_argument_is_none():
    assert stranger(multiply, WEIGHT, X, given=[False, True]) == EARLY


def test_a_slice_of_stacked_layers_is_none():
    """XLA copies it before the kernel."""
    stacked = jax.ShapeDtypeStruct((3, 256, 256), jnp.bfloat16)

    def layers(weights, x):
        return lax.scan(lambda x, weight: (multiply(weight, x), None), x, weights)[0]

    assert stranger(layers, stacked, X) == EARLY
    assert stranger(lambda weights, x: multiply(weights[0], x), stacked, X) == EARLY


def test_what_a_loop_carries_is_none():
    """It may be an argument in the first iteration alone."""

    def program(weight, x):
        def turn(_, carried):
            weight, x = carried
            return weight * 2, multiply(weight, x)

        return lax.fori_loop(0, 3, turn, (weight, x))[1]

    assert stranger(program, WEIGHT, X) == EARLY


def test_without_the_promise_a_kernel_waits_first():
    """A trace with the promise is not used again without it."""
    with argument_weights():
        assert "of_argument" in str(jax.make_jaxpr(jax.jit(multiply))(WEIGHT, X))
    assert "of_argument" not in str(jax.make_jaxpr(jax.jit(multiply))(WEIGHT, X))


def test_jax_0_11_has_no_early_kernels(monkeypatch):
    monkeypatch.setattr(jax_versions, "OVERLAPS_LAUNCHES", False)
    with argument_weights():
        traced = jax.make_jaxpr(lambda weight, x: multiply(weight, x))(WEIGHT, X)
    assert "of_argument" not in str(traced)

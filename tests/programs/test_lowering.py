"""A traced program copies weights early if they are its arguments, and not otherwise."""

import pytest

from jaxkv.programs.lowering import Lowering, trace
from tests.early_products import NAME, WEIGHT, X, hopper, multiply  # noqa: F401 - a fixture of all tests


def is_early(function, *arguments):
    lowering = Lowering(
        lambda first, cache, *rest: (cache, function(first, cache, *rest)), arguments
    )
    return NAME in str(trace("program", lowering).jaxpr)


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

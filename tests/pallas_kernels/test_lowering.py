"""`quick_lowering` changes how fast JAX 0.11 infers layouts, and nothing that it infers."""

import random
from itertools import pairwise
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.mosaic.gpu import constraints

from pallas_kernels.lowering import _equal_variables, quick_lowering


def system_of(seed, variables=40, equalities=60):
    """Returns a system with equalities of variables, with constants, and with constraints of another kind."""
    draw = random.Random(seed)
    known = [constraints.Variable(f"v{number}") for number in range(variables)]
    found = [constraints.Divides(known[0], (8,))]
    for _ in range(draw.randrange(equalities)):
        one, other = draw.choice(known), draw.choice([*known, constraints.RegisterLayout("wgmma")])
        found.append(constraints.Equals(one, other))
    return SimpleNamespace(constraints=found)


@pytest.mark.parametrize("seed", range(20))
def test_the_same_variables_are_equal_as_by_jax(seed):
    system = system_of(seed)
    theirs = constraints.compute_transitively_equal_vars(system)
    ours = _equal_variables(system)
    assert {variable: set(others) for variable, others in ours.items()} == {
        variable: set(others) for variable, others in theirs.items()
    }
    assert all(len(set(others)) == len(others) for others in ours.values())


def test_their_order_is_that_of_the_constraints():
    names = "dcba"
    known = [constraints.Variable(name) for name in names]
    chain = [constraints.Equals(*pair) for pair in pairwise(known)]
    found = _equal_variables(SimpleNamespace(constraints=chain))
    assert "".join(variable.key for variable in found) == names
    assert "".join(variable.key for variable in found[known[0]]) == "cba"


@pytest.fixture
def on_jax_0_11(monkeypatch):
    """Pretends that this is a JAX whose inference of layouts is replaced."""
    monkeypatch.setattr(jax, "__version__", "0.11.2")


def test_jax_has_its_own_again_behind_the_block_and_after_an_error(on_jax_0_11):
    theirs = constraints.compute_transitively_equal_vars
    with quick_lowering():
        assert constraints.compute_transitively_equal_vars is _equal_variables
    with pytest.raises(KeyError), quick_lowering():
        raise KeyError
    assert constraints.compute_transitively_equal_vars is theirs


def test_blocks_of_two_threads_may_end_in_any_order(on_jax_0_11):
    theirs = constraints.compute_transitively_equal_vars
    first, second = quick_lowering(), quick_lowering()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert constraints.compute_transitively_equal_vars is _equal_variables
    second.__exit__(None, None, None)
    assert constraints.compute_transitively_equal_vars is theirs


def test_jax_0_12_is_left_alone(monkeypatch):
    theirs = constraints.compute_transitively_equal_vars
    monkeypatch.setattr(jax, "__version__", "0.12.0.1")
    with quick_lowering():
        assert constraints.compute_transitively_equal_vars is theirs

"""Fixtures of the ops' suites."""

from dataclasses import replace

import jax
import jaxtyping
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

from pallas_kernels.mosaic import jax_versions, launch
from tests.pallas_kernels import contract

# Part of the keys of JAX's caches of traces, so that no trace of the other forms is used.
_OTHER_FORMS = jax.make_user_context(False)


@pytest.fixture(autouse=True)
def programs_of_a_test(request):
    """Lets a test compile each program once, unless it changes functions, which programs may have been traced with."""
    contract.PROGRAMS = None if "monkeypatch" in request.fixturenames else {}
    yield
    contract.PROGRAMS = None


@pytest.fixture
def as_in_production():
    """Switches the suites' shape checker off, so that an op's own refusals are met."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def races():
    """Tells whether the interpreter saw a race, and leaves it as it was found."""
    yield lambda: interpreter.get_races().races_found
    interpreter.reset_gpu_interpret_mode_state()


@pytest.fixture
def races_may_follow(monkeypatch):
    """Lets the interpreter go on after a race and record it; from JAX 0.12 on it raises otherwise."""
    found = launch.INTERPRETER
    recorded = {"on_race": "warn"} if hasattr(found, "on_race") else {}
    monkeypatch.setattr(launch, "INTERPRETER", replace(found, **recorded))


@pytest.fixture
def one_by_one(monkeypatch):
    """Makes the interpreter add up products in order; in BLAS the order depends on the number of rows."""

    def multiply(left, right, dtype):
        total = np.zeros((left.shape[0], right.shape[1]), dtype)
        for place in range(left.shape[1]):
            total += left[:, place, None].astype(dtype) * right[None, place].astype(dtype)
        return total

    monkeypatch.setattr(np, "matmul", multiply)


@pytest.fixture
def no_requests(monkeypatch):
    """Gives kernels the forms that they have where requests for registers are ignored (JAX 0.12)."""
    monkeypatch.setattr(jax_versions, "HONOURS_REGISTER_REQUESTS", False)
    with _OTHER_FORMS(True):
        yield

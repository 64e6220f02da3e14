"""Fixtures of the ops' suites."""

import jaxtyping
import pytest


@pytest.fixture
def as_in_production():
    """Switches the suites' shape checker off, so that an op's own refusals are met."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

"""Parameters of tests of which `make test` takes a few and `make test-all` takes all."""

import pytest


def fast_cases(names, *fast):
    """Returns parameters for `parametrize`, one for each name; all but those in `fast` are marked as slow."""
    names = list(names)
    assert set(fast) <= set(names), f"{sorted(set(fast) - set(names))} are no cases"
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in fast)) for name in names]

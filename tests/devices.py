"""The devices of tests over several of them: `tests/conftest.py` gives a CPU eight."""

import jax
import pytest


def needs_devices(count):
    """Marks tests that need this many devices; a machine with fewer GPUs skips them."""
    found = len(jax.devices())
    return pytest.mark.skipif(
        found < count, reason=f"needs {count} devices, and there are {found} here"
    )

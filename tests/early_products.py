"""A product whose kernel may copy its weight early, and the pretence of an H200 to trace it for."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import device, skinny_matmul
from pallas_kernels.mosaic import jax_versions

X = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
WEIGHT = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
NAME = "skinny_matmul_of_argument"


def multiply(weight, x):
    return skinny_matmul(weight, x, implementation="mosaic_gpu")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Pretends that JAX compiles for an H200, where launches overlap; nothing may run then."""
    monkeypatch.setattr(device, "gpu_arch", lambda: device.HOPPER)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    monkeypatch.setattr(jax_versions, "OVERLAPS_LAUNCHES", True)

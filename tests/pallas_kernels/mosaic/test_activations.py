"""Activations of kernels, in plain JAX, beside float64."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic.activations import softplus


def test_softplus_errs_by_the_last_bits_alone():
    x = np.linspace(-80, 80, 100_001, dtype=np.float32)
    wanted = np.logaddexp(0, x.astype(np.float64))
    found = np.asarray(softplus(jnp.asarray(x))).astype(np.float64)
    assert np.abs(found / wanted - 1).max() < 5e-7


def test_softplus_of_what_is_not_finite():
    found = np.asarray(softplus(jnp.array([-jnp.inf, -200.0, jnp.inf, jnp.nan])))
    np.testing.assert_array_equal(found, [0, 0, np.inf, np.nan])

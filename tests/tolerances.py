"""The table of tolerances of all kernels. It is never loosened for a kernel."""

import numpy as np

from pallas_kernels.workbench.tolerances import OUTPUT

__all__ = ["LSE", "OUTPUT", "assert_lse", "assert_output"]

# Of a log-sum-exp, which is float32 for every dtype of the inputs.
LSE = 2e-5


def assert_output(actual, wanted, dtype):
    """Compares finite outputs of an op that computed in `dtype` with those of a float64 oracle."""
    tolerance = OUTPUT[dtype]
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), wanted, rtol=tolerance, atol=tolerance, equal_nan=False
    )


def assert_lse(actual, wanted):
    """Compares log-sum-exps; empty rows must hold minus infinity on both sides."""
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), wanted, rtol=LSE, atol=LSE, equal_nan=False
    )

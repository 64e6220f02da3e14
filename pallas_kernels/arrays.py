"""The type of arguments of which a function reads the shape and the dtype only."""

import jax
import numpy as np

ArrayOrStruct = jax.Array | np.ndarray | jax.ShapeDtypeStruct
"""An array, or the `jax.ShapeDtypeStruct` of one. Checks and plans of a launch take either and read no values."""

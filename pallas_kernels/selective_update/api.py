"""Public entry point of `selective_update`: one token of a Mamba layer's recurrence for every row."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_shape
from pallas_kernels.arguments.selective import SelectiveArrays, check_selective
from pallas_kernels.arguments.states import check_states
from pallas_kernels.dispatch import choose
from pallas_kernels.selective_update import xla


def selective_update(
    a_log: Shaped[Array | np.ndarray, "channels d_state"],
    skip: Shaped[Array | np.ndarray, " channels"],
    dt_bias: Shaped[Array | np.ndarray, " channels"],
    states: Float[Array, "states channels d_state"],
    x: Shaped[Array | np.ndarray, "rows channels"],
    dt: Shaped[Array | np.ndarray, "rows channels"],
    b: Shaped[Array | np.ndarray, "rows d_state"],
    c: Shaped[Array | np.ndarray, "rows d_state"],
    read_states: Shaped[Array | np.ndarray, " rows"],
    write_states: Shaped[Array | np.ndarray, " rows"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows channels"], Float[Array, "states channels d_state"]]:
    """Updates each row's state by one token and returns its output, as `selective_scan` does over one token.

    The update is in float32. The output uses the state before it is rounded to the pool's dtype. In one call, no state
    may be read by one row and written by another; this is checked for concrete ids.

    Args:
        a_log: logarithm of the decay rate of each component of each channel's state.
        skip: each channel's factor of the connection from x to the output.
        dt_bias: bias of dt.
        states: the pool of states, floating, usually float32. Donate it for an update in place.
        x: each row's inputs, the result of `causal_conv`.
        dt: each row's step per channel, before bias and softplus.
        b: each row's factors from a channel's input to its state.
        c: each row's factors from a channel's state to its output.
        read_states: int32 initial state of each row; an id past the end means zeros.
        write_states: int32 final state of each row. A row whose id is past the end is padding and may hold any values.
        implementation: "xla", or `None` for the first that can run.

    Returns:
        The outputs in x's dtype, zeros for padding rows; and the updated pool.

    Raises:
        ValueError: shapes, dtypes or concrete ids do not fit.
        Unsupported: the requested implementation cannot run; the message gives the reason.
    """
    check_selective(a_log, skip, dt_bias, states, x, dt, b, c)
    check_states(states.shape[0], read_states, write_states)
    check_shape("read_states", read_states, (x.shape[0],))
    choose("selective_update", {"xla": lambda: None}, implementation)
    arrays = (a_log, skip, dt_bias, states, x, dt, b, c, read_states, write_states)
    *given, read, write = (jnp.asarray(array) for array in arrays)
    return xla.selective_update(SelectiveArrays(*given), read, write)

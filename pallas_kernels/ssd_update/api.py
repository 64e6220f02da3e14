"""Public entry point of `ssd_update`: one token of a Mamba-2 layer's recurrence for every row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_shape
from pallas_kernels.arguments.ssd import SsdArrays, check_layer
from pallas_kernels.arguments.states import check_states
from pallas_kernels.dispatch import choose
from pallas_kernels.ssd_update import mosaic_gpu, xla


def ssd_update(
    a_log: Shaped[Array | np.ndarray, " heads"],
    d: Shaped[Array | np.ndarray, " heads"],
    dt_bias: Shaped[Array | np.ndarray, " heads"],
    states: Float[Array, "states heads head_dim d_state"],
    xbc: Shaped[Array | np.ndarray, "rows wide"],
    dt: Shaped[Array | np.ndarray, "rows heads"],
    read_states: Shaped[Array | np.ndarray, " rows"],
    write_states: Shaped[Array | np.ndarray, " rows"],
    *,
    z: Shaped[Array | np.ndarray, "rows d_inner"] | None = None,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    implementation: str | None = None,
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Updates each row's state by one token and returns its output, as `ssd_scan` does over one token.

    The update is in float32. The output uses the state before it is rounded to the pool's dtype. In one call, no state
    may be read by one row and written by another; this is checked for concrete ids.

    Args:
        a_log: logarithm of each head's decay rate.
        d: each head's factor of the skip connection from x to the output.
        dt_bias: bias of dt.
        states: the pool of states, floating, usually float32 for any dtype of xbc. Donate it for an update in place.
        xbc: each row's x of all heads, then B of all groups, then C. Head h uses group `h // (heads // groups)`.
        dt: each row's step per head, before bias and softplus.
        read_states: int32 initial state of each row; an id past the end means zeros.
        write_states: int32 final state of each row. A row whose id is past the end is padding and may hold any values.
        z: gates of the outputs, which are multiplied by silu(z); `None` for none.
        dt_limits: least and greatest step.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The outputs in xbc's dtype, zeros for padding rows; and the updated pool.

    Raises:
        ValueError: shapes, dtypes, options or concrete ids do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    check_layer(a_log, d, dt_bias, states, xbc, dt, z, dt_limits)
    check_states(states.shape[0], read_states, write_states)
    check_shape("read_states", read_states, (xbc.shape[0],))
    given = (a_log, d, dt_bias, states, xbc, dt)
    # `None` is an empty pytree, so absent arguments stay `None`.
    given, *ids, gate = jax.tree.map(jnp.asarray, (given, read_states, write_states, z))
    layer = SsdArrays(*given)
    refuses = partial(mosaic_gpu.why_not, layer.states, layer.xbc)
    reasons = {"mosaic_gpu": refuses, "xla": lambda: None}
    chosen = choose("ssd_update", reasons, implementation)
    if not xbc.shape[0]:
        return jnp.zeros((0, *states.shape[1:3]), xbc.dtype), layer.states
    function = mosaic_gpu.ssd_update if chosen == "mosaic_gpu" else xla.ssd_update
    return function(layer, *ids, z=gate, dt_limits=dt_limits)

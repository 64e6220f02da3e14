"""The door to `ssd_update`: one token of a Mamba-2 layer's recurrence for every row."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_shape
from pallas_kernels.arguments.ssd import check_layer
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
    """Steps each row's state by one token and reads an output from it, as `ssd_scan` does over one token.

    The state is stepped in float32 and rounded to the pool's dtype when it is written; the output is read before
    that. In one call no state may be read by one row and written by another; that is checked where ids are known.

    Args:
        a_log: log of the rate at which each head forgets.
        d: what each head adds of its input to its output.
        dt_bias: added to dt.
        states: the pool of states, floating, usually float32 whatever xbc is. Donate it: it is written in place.
        xbc: each row's x of all heads, then B of all groups, then C. Head h reads group `h // (heads // groups)`.
        dt: each row's step per head, before bias and softplus.
        read_states: int32 state that each row starts from; one past the end reads zeros.
        write_states: int32 state that each row ends in. A row that writes none, because this is past the end, is
            padding: it may hold anything.
        z: gate of each output, which is multiplied by silu(z); `None` for none.
        dt_limits: least and greatest step.
        implementation: "mosaic_gpu", "xla", or `None` for the best that can run.

    Returns:
        The outputs in xbc's dtype, zeros for padding rows; and the pool.

    Raises:
        ValueError: shapes, dtypes, options or known ids do not fit.
        Unsupported: the implementation asked for, or every one, cannot run; the message carries each reason.
    """
    check_layer(a_log, d, dt_bias, states, xbc, dt, z, dt_limits)
    check_states(states.shape[0], read_states, write_states)
    check_shape("read_states", read_states, (xbc.shape[0],))
    tables = (read_states, write_states)
    layer = (a_log, d, dt_bias, states, xbc, dt)
    # To JAX `None` is a tree without leaves.
    arrays, gate = jax.tree.map(jnp.asarray, ((*layer, *tables), z))
    reasons = {"mosaic_gpu": lambda: mosaic_gpu.why_not(arrays[3], arrays[4]), "xla": lambda: None}
    chosen = choose("ssd_update", reasons, implementation)
    if not xbc.shape[0]:
        return jnp.zeros((0, *states.shape[1:3]), xbc.dtype), arrays[3]
    function = mosaic_gpu.ssd_update if chosen == "mosaic_gpu" else xla.ssd_update
    return function(*arrays, z=gate, dt_limits=dt_limits)

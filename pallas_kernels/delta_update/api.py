"""Public entry point of `delta_update`: one token of a gated delta layer's recurrence for every row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_shape
from pallas_kernels.arguments.delta import DeltaArrays, check_delta
from pallas_kernels.arguments.states import check_states
from pallas_kernels.delta_update import mosaic_gpu, xla
from pallas_kernels.dispatch import choose


def delta_update(
    a_log: Shaped[Array | np.ndarray, " heads"],
    dt_bias: Shaped[Array | np.ndarray, " decays"],
    states: Float[Array, "states heads key_dim value_dim"],
    qkv: Shaped[Array | np.ndarray, "rows wide"],
    a: Shaped[Array | np.ndarray, "rows decays"],
    b: Shaped[Array | np.ndarray, "rows heads"],
    read_states: Shaped[Array | np.ndarray, " rows"],
    write_states: Shaped[Array | np.ndarray, " rows"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Updates each row's state by one token and returns its output, as `delta_scan` does over one token.

    The update is in float32. The output uses the state before it is rounded to the pool's dtype. In one call, no state
    may be read by one row and written by another; this is checked for concrete ids.

    Args:
        a_log: logarithm of each head's decay rate.
        dt_bias: bias of a; `decays` is `heads` or `heads * key_dim`.
        states: the pool of states, floating, usually float32. Donate it for an update in place.
        qkv: each row's queries of all key heads, then keys, then values of all heads.
        a: each row's steps, before bias and softplus.
        b: each row's strength of correction per head, before the sigmoid.
        read_states: int32 initial state of each row; an id past the end means zeros.
        write_states: int32 final state of each row. A row whose id is past the end is padding and may hold any values.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The outputs in qkv's dtype, zeros for padding rows; and the updated pool.

    Raises:
        ValueError: shapes, dtypes or concrete ids do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    check_delta(a_log, dt_bias, states, qkv, a, b)
    check_states(states.shape[0], read_states, write_states)
    check_shape("read_states", read_states, (qkv.shape[0],))
    given = (a_log, dt_bias, states, qkv, a, b)
    given, *ids = jax.tree.map(jnp.asarray, (given, read_states, write_states))
    layer = DeltaArrays(*given)
    refuses = partial(mosaic_gpu.why_not, layer.states, layer.qkv)
    reasons = {"mosaic_gpu": lambda: layer.refusal() or refuses(), "xla": lambda: None}
    chosen = choose("delta_update", reasons, implementation)
    if not qkv.shape[0]:
        return jnp.zeros((0, states.shape[1], states.shape[3]), qkv.dtype), layer.states
    function = mosaic_gpu.delta_update if chosen == "mosaic_gpu" else xla.delta_update
    return function(layer, *ids)

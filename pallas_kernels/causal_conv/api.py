"""Public entry point of `causal_conv`: the short causal convolution before a state-space layer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments.checks import check_shape
from pallas_kernels.arguments.states import check_bounds, check_floats, check_states
from pallas_kernels.causal_conv import mosaic_gpu, xla
from pallas_kernels.causal_conv.arguments import ConvArrays
from pallas_kernels.dispatch import choose

ACTIVATIONS = ("silu", None)


def causal_conv(
    weight: Shaped[Array | np.ndarray, "d_conv channels"],
    bias: Shaped[Array | np.ndarray, " channels"] | None,
    states: Float[Array, "states tail channels"],
    x: Shaped[Array | np.ndarray, "tokens wide"],
    read_states: Shaped[Array | np.ndarray, " rows"],
    write_states: Shaped[Array | np.ndarray, " rows"],
    cu_q_lens: Shaped[Array | np.ndarray, " row_bounds"] | None = None,
    snapshot_ends: Shaped[Array | np.ndarray, " snapshots"] | None = None,
    snapshot_states: Shaped[Array | np.ndarray, " snapshots"] | None = None,
    *,
    first_channel: int = 0,
    activation: str | None = "silu",
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "states tail channels"]]:
    """Computes a depthwise causal convolution over rows, whose last `d_conv - 1` inputs are kept as the state.

    This is the convolution of Mamba (causal-conv1d), with a pool of states. A row reads its state before it writes one,
    so both may be the same. Rows without tokens change nothing. A row shorter than the window keeps the newest inputs
    of its initial state. In one call, no state may be read by one row and written by another, and a snapshot's state
    must not be used otherwise; this is checked for concrete ids.

    Args:
        weight: one tap per input of the window and channel; the last tap is that of the token itself.
        bias: one value per channel, or `None`.
        states: the pool of states, the oldest input first, in x's dtype. Donate it for an update in place.
        x: inputs of all rows, one row after the other, in columns `first_channel : first_channel + channels`. Other
            columns are not read, so x can be a projection's whole output. Padding tokens may hold any value.
        read_states: int32 initial state of each row; an id past the end means zeros.
        write_states: int32 final state of each row; an id past the end writes nothing.
        cu_q_lens: int32 bounds: row r's tokens are `x[cu_q_lens[r]:cu_q_lens[r + 1]]`. With `None` row r has only token
            r, and a row that writes nothing is padding.
        snapshot_ends: int32, ascending: for each snapshot the number of packed tokens before it. It is the state of the
            row of the last of these tokens, after that token. Ends past the last row's are ignored.
        snapshot_states: int32 state that each snapshot is written to; an id past the end writes nothing.
        first_channel: first column of x that is an input.
        activation: "silu", or `None` for none.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The outputs in x's dtype, computed in float32, zeros for padding tokens; and the updated pool.

    Raises:
        ValueError: shapes, dtypes, options or concrete ids do not fit.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    options = {"first_channel": first_channel, "activation": activation}
    _check(weight, bias, states, x, **options)
    check_states(states.shape[0], read_states, write_states, snapshot_ends, snapshot_states)
    _check_rows(x.shape[0], read_states.shape[0], cu_q_lens, snapshot_ends)
    tables = (read_states, write_states, cu_q_lens, snapshot_ends, snapshot_states)
    # `None` is an empty pytree, so absent arguments stay `None`.
    arrays = ConvArrays(*jax.tree.map(jnp.asarray, (weight, bias, states, x, *tables)))
    refuses = partial(mosaic_gpu.why_not, arrays.weight, arrays.x, first_channel=first_channel)
    reasons = {"mosaic_gpu": refuses, "xla": lambda: None}
    chosen = choose("causal_conv", reasons, implementation)
    if not len(read_states) or not x.shape[0]:
        return jnp.zeros((x.shape[0], weight.shape[1]), x.dtype), arrays.states
    function = mosaic_gpu.causal_conv if chosen == "mosaic_gpu" else xla.causal_conv
    return function(arrays, **options)


def _check(
    weight: Array | np.ndarray,
    bias: Array | np.ndarray | None,
    states: Array,
    x: Array | np.ndarray,
    *,
    first_channel: int,
    activation: str | None,
) -> None:
    """Raises `ValueError` for arrays and options that do not fit each other."""
    check_shape("weight", weight, (None, None))
    d_conv, channels = weight.shape
    if d_conv < 2:
        raise ValueError(
            f"weight must have at least 2 taps, got {d_conv}; for one tap multiply x by it instead"
        )
    check_shape("states", states, (None, d_conv - 1, channels))
    check_shape("x", x, (None, None))
    if bias is not None:
        check_shape("bias", bias, (channels,))
    if not 0 <= first_channel <= x.shape[1] - channels:
        raise ValueError(
            f"x must hold {channels} channels from column {first_channel} on, got {x.shape[1]} columns"
        )
    check_floats(weight=weight, bias=bias, states=states, x=x)
    for name, array in {"weight": weight, "bias": bias, "states": states}.items():
        if array is not None and array.dtype != x.dtype:
            raise ValueError(f"{name} must have x's dtype, {x.dtype}, got {array.dtype}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")


def _check_rows(
    tokens: int,
    rows: int,
    cu_q_lens: Array | np.ndarray | None,
    snapshot_ends: Array | np.ndarray | None,
) -> None:
    if cu_q_lens is not None:
        check_bounds(cu_q_lens, rows, tokens)
        return
    if rows != tokens:
        raise ValueError(
            f"without cu_q_lens every row has one token, got {rows} rows and {tokens} tokens"
        )
    if snapshot_ends is not None:
        raise ValueError(
            "got snapshot_ends without cu_q_lens, where each row has one token and its final state only; "
            "name that state in write_states"
        )

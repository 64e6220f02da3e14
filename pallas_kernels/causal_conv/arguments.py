"""The arrays of `causal_conv`, as its `api.py` passes them to the implementations."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class ConvArrays(NamedTuple):
    """The arrays of a call, described in `api.py`; absent ones are `None`."""

    weight: Float[Array, "d_conv channels"]
    bias: Float[Array, " channels"] | None
    states: Float[Array, "states tail channels"]
    x: Float[Array, "tokens wide"]
    read_states: Int[Array, " rows"]
    write_states: Int[Array, " rows"]
    cu_q_lens: Int[Array, " row_bounds"] | None = None
    snapshot_ends: Int[Array, " snapshots"] | None = None
    snapshot_states: Int[Array, " snapshots"] | None = None

"""`causal_conv` on Hopper with a Mosaic GPU kernel: limits and the call. The kernel is in mosaic_block.py."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.causal_conv.arguments import ConvArrays
from pallas_kernels.causal_conv.mosaic_block import Geometry, Kernel
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.packed.rows import cut

_DTYPES = ("float32", "bfloat16", "float16")
# Alignment of the inputs in elements, for loads of up to 16 bytes in any dtype.
_ALIGNED = 8


def why_not(
    weight: Float[ArrayOrStruct, "d_conv channels"],
    x: Float[ArrayOrStruct, "tokens wide"],
    *,
    first_channel: int,
) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(weight, x, first_channel=first_channel)


def refusal(
    weight: Float[ArrayOrStruct, "d_conv channels"],
    x: Float[ArrayOrStruct, "tokens wide"],
    *,
    first_channel: int,
) -> str | None:
    """Returns why the kernel cannot be built for these arrays, or `None` if it can."""
    if x.dtype.name not in _DTYPES:
        return f"x must be one of {', '.join(_DTYPES)}, got {x.dtype}"
    numbers = weight.shape[1], x.shape[1], first_channel
    if any(number % _ALIGNED for number in numbers):
        return (
            f"channels, columns of x and the first channel must be multiples of {_ALIGNED}, "
            f"got {numbers[0]}, {numbers[1]} and {numbers[2]}"
        )
    if weight.shape[0] > 8:
        return f"d_conv must be at most 8, got {weight.shape[0]}"
    return None


def causal_conv(
    arrays: ConvArrays,
    *,
    first_channel: int = 0,
    activation: str | None = "silu",
    interpret: bool = False,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "states tail channels"]]:
    """Implements `api.causal_conv`; negative ids are treated as past the end.

    With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly; races are recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    weight, x = arrays.weight, arrays.x
    check_kernel(refusal(weight, x, first_channel=first_channel))
    geometry = Geometry.of(weight, x, first_channel, activation == "silu")
    return convolve(arrays, geometry=geometry, interpret=interpret)


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("geometry", "interpret"))
def convolve(
    arrays: ConvArrays,
    *,
    geometry: Geometry,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "states tail channels"]]:
    """Runs the kernel for one geometry."""
    weight, bias, states, x, read_states, write_states = arrays[:6]
    cu_q_lens, snapshot_ends, snapshot_states = arrays[6:]
    named = {"weight": weight, "x": x, "read_states": read_states, "write_states": write_states}
    named |= {} if bias is None else {"bias": bias}
    num_tiles = len(x)
    if cu_q_lens is not None:
        tables = _tables(cu_q_lens, snapshot_ends, len(x), geometry.tile)
        num_tiles = len(tables["tiles"])
        named |= {"cu_q_lens": cu_q_lens, **tables}
        if snapshot_ends is not None and snapshot_states is not None:
            named |= {"snapshot_ends": snapshot_ends, "snapshot_states": snapshot_states}
    pool = jax.new_ref(states)
    kernel = Kernel(geometry, tuple(named))
    out = kernel.build(len(x), num_tiles, interpret)(*named.values(), pool)
    return out, jax.freeze(pool)


def _tables(
    cu_q_lens: Int[Array, " row_bounds"],
    snapshot_ends: Int[Array, " snapshots"] | None,
    tokens: int,
    tile: int,
) -> dict[str, Int[Array, "..."]]:
    """Returns the tables "tiles" (row, first token, number of tokens, whether it is the row's first) and "snapshots".

    "snapshots" has the bounds of each row's snapshots. Padding tokens are one more row.
    """
    bounds = jnp.append(cu_q_lens, jnp.int32(tokens))
    pieces = cut(bounds, jnp.zeros(len(cu_q_lens), jnp.int32), tokens=tokens, size=tile)
    fields = (pieces.row, pieces.start, pieces.length, pieces.first.astype(jnp.int32))
    tables = {"tiles": jnp.stack(fields, axis=1)}
    if snapshot_ends is not None:
        # Row r's snapshots are `snapshots[r]:snapshots[r + 1]`.
        behind = snapshot_ends[None, :] <= cu_q_lens[:, None]
        tables["snapshots"] = jnp.sum(behind, axis=1, dtype=jnp.int32)
    return tables

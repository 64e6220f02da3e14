"""`ssd_scan` on Hopper with two Mosaic GPU kernels: limits, and the XLA operations before and after the kernels.

mosaic_decay.py computes the prefix sums of log decays; mosaic_launch.py launches the scan.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments.ssd import SsdArrays
from pallas_kernels.arguments.states import StateTables
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.mosaic.activations import Limits
from pallas_kernels.packed.row_tasks import tasks_of
from pallas_kernels.packed.rows import cut
from pallas_kernels.packed.states import snapshot_of_pieces
from pallas_kernels.ssd_scan.mosaic_decay import decays
from pallas_kernels.ssd_scan.mosaic_kernel import Kernel
from pallas_kernels.ssd_scan.mosaic_launch import build
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE, Geometry, Schedule


def why_not(states: ArrayOrStruct, xbc: ArrayOrStruct, *, chunk_size: int) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(states, xbc, chunk_size=chunk_size)


def refusal(states: ArrayOrStruct, xbc: ArrayOrStruct, *, chunk_size: int) -> str | None:
    """Returns why the kernel cannot be built for these arrays, or `None` if it can."""
    return Geometry.of(states, xbc).refusal(chunk_size)


def ssd_scan(
    layer: SsdArrays,
    tables: StateTables,
    *,
    chunk_size: int,
    z: Float[Array, "tokens d_inner"] | None = None,
    dt_limits: Limits = (0.0, float("inf")),
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Implements `api.ssd_scan`; negative ids are treated as past the end.

    With `interpret` the kernels run in Pallas's interpreter on the CPU, slowly; races are recorded.

    Raises:
        ValueError: the kernels do not support the shapes or dtypes.
    """
    geometry = Geometry.of(layer.states, layer.xbc)
    check_kernel(geometry.refusal(chunk_size))
    schedule = Schedule.by_rule(geometry, len(tables.read_states))
    options = {"chunk_size": chunk_size, "dt_limits": dt_limits, "interpret": interpret}
    return scan(layer, tables, z, schedule=schedule, **options)


# A model's layers call this with equal shapes; under its own jit the kernels are lowered once for all of them.
@partial(jax.jit, static_argnames=("chunk_size", "dt_limits", "schedule", "interpret"))
def scan(
    layer: SsdArrays,
    tables: StateTables,
    z: Float[Array, "tokens d_inner"] | None,
    *,
    chunk_size: int,
    dt_limits: Limits,
    schedule: Schedule,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "states heads head_dim d_state"]]:
    """Runs the kernels under a schedule."""
    a_log, d, dt_bias, states, xbc, dt = layer
    cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, _ = tables
    tokens = len(xbc)
    positions = seq_lens - (cu_q_lens[1:] - cu_q_lens[:-1])
    pieces = cut(cu_q_lens, positions, tokens=tokens, size=SIDE)
    options = {"size": SIDE, "dt_limits": dt_limits, "interpret": interpret}
    passed = decays(a_log, dt_bias, dt, pieces, **options)
    passed = passed.reshape(*passed.shape[:2], 2 * SIDE)
    tasks = tasks_of(cu_q_lens, positions, read_states, write_states, tokens=tokens, size=SIDE)
    kept = []
    if snapshot_ends is not None and len(snapshot_ends):
        kept = [snapshot_of_pieces(pieces, tables, len(states), chunk_size)]
    # TMA zero-fills copies that reach past the last token; the interpreter refuses them, so its input is padded.
    inputs = jnp.pad(xbc, ((0, SIDE), (0, 0))) if interpret else xbc
    kernel = Kernel(Geometry.of(states, xbc), schedule, bool(kept), interpret)
    pool = jax.new_ref(states)
    out = build(kernel, tokens, len(tasks))(inputs, passed, d, tasks, *kept, pool)
    if z is not None:
        out = _gated(out, z, cu_q_lens)
    return out.reshape(tokens, *states.shape[1:3]), jax.freeze(pool)


def _gated(
    out: Float[Array, "tokens d_inner"],
    z: Float[Array, "tokens d_inner"],
    cu_q_lens: Int[Array, " row_bounds"],
) -> Float[Array, "tokens d_inner"]:
    """Multiplies outputs by silu(z); z of padding tokens may hold any value."""
    real = (jnp.arange(len(z), dtype=jnp.int32) < cu_q_lens[-1])[:, None]
    gate = jax.nn.silu(jnp.where(real, z, jnp.zeros_like(z)).astype(jnp.float32))
    return (out.astype(jnp.float32) * gate).astype(out.dtype)

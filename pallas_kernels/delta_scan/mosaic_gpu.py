"""`delta_scan` on Hopper with two Mosaic GPU kernels: each piece's triangular system, then the scan over pieces."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.arguments.delta import DeltaArrays, gates_of
from pallas_kernels.arguments.states import StateTables
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.delta_scan.mosaic_geometry import SIDE, Geometry
from pallas_kernels.delta_scan.mosaic_kernel import Kernel
from pallas_kernels.delta_scan.mosaic_launch import build
from pallas_kernels.delta_scan.mosaic_system import systems
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.packed.row_tasks import tasks_of
from pallas_kernels.packed.rows import Pieces, cut
from pallas_kernels.packed.states import snapshot_of_pieces

# A token's base-2 log decay is at least this: its exponential is 0, and sums over a piece keep their precision.
_LEAST_DECAY = -160.0


def why_not(states: ArrayOrStruct, qkv: ArrayOrStruct, *, chunk_size: int) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(states, qkv, chunk_size=chunk_size)


def refusal(states: ArrayOrStruct, qkv: ArrayOrStruct, *, chunk_size: int) -> str | None:
    """Returns why the kernel cannot be built for these arrays, or `None` if it can."""
    return Geometry.of(states, qkv).refusal(chunk_size)


def delta_scan(
    layer: DeltaArrays,
    tables: StateTables,
    *,
    chunk_size: int,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Implements `api.delta_scan`; negative ids are treated as past the end.

    With `interpret` the kernels run in Pallas's interpreter on the CPU, slowly; races are recorded.

    Raises:
        ValueError: the kernels do not support the shapes or dtypes.
    """
    check_kernel(layer.refusal() or refusal(layer.states, layer.qkv, chunk_size=chunk_size))
    return scan(layer, tables, chunk_size=chunk_size, interpret=interpret)


# A model's layers call this with equal shapes; under its own jit the kernels are lowered once for all of them.
@partial(jax.jit, static_argnames=("chunk_size", "interpret"))
def scan(
    layer: DeltaArrays, tables: StateTables, *, chunk_size: int, interpret: bool
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "states heads key_dim value_dim"]]:
    """Runs the kernels."""
    states, qkv = layer.states, layer.qkv
    cu_q_lens, seq_lens, read_states, write_states, snapshot_ends, _ = tables
    tokens = len(qkv)
    positions = seq_lens - (cu_q_lens[1:] - cu_q_lens[:-1])
    pieces = cut(cu_q_lens, positions, tokens=tokens, size=SIDE)
    sizes = {"tokens": tokens, "size": SIDE}
    tasks = tasks_of(cu_q_lens, positions, read_states, write_states, **sizes)
    kept = []
    if snapshot_ends is not None and len(snapshot_ends):
        kept = [snapshot_of_pieces(pieces, tables, len(states), chunk_size)]
    kernel = Kernel(Geometry.of(states, qkv), bool(kept), interpret)
    # TMA zero-fills copies that reach past the last token; the interpreter refuses them, so its input is padded.
    inputs = jnp.pad(qkv, ((0, SIDE), (0, 0))) if interpret else qkv
    found = systems(kernel, inputs, _gates(layer, pieces), pieces)
    pool = jax.new_ref(states)
    out = build(kernel, tokens, len(tasks))(inputs, *found, tasks, *kept, pool)
    return out.reshape(tokens, states.shape[1], states.shape[3]), jax.freeze(pool)


def _gates(layer: DeltaArrays, pieces: Pieces) -> Float[Array, "pieces heads 2 size"]:
    """Returns the base-2 log decay and beta of each piece's tokens, zeros past a piece's end."""
    decay, beta = gates_of(layer.a_log, layer.dt_bias, layer.a, layer.b)
    table = jnp.stack((jnp.maximum(decay[..., 0] * LOG2_E, _LEAST_DECAY), beta), axis=2)
    inside = jnp.arange(SIDE, dtype=jnp.int32)
    real = inside[None, :] < pieces.length[:, None]
    token = jnp.where(real, pieces.start[:, None] + inside[None, :], 0)
    return jnp.where(real[:, :, None, None], table[token], 0.0).transpose(0, 2, 3, 1)

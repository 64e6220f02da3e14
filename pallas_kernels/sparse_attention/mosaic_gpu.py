"""`sparse_attention` on Hopper with a Mosaic GPU kernel: limits, and the XLA operations before and after the kernel.

The kernel is that of `latent_kernel/` with another producer: a token is a row of one query, and its tiles are gathered
from the records at its slots. Each block gathers for itself (mosaic_producer.py), or the two blocks of 65 to 128 heads
gather for each other (mosaic_pair_producer.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments.latent import LatentOptions, SparseArrays
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import MOST_ON_AN_AXIS, why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.latent_kernel.kernel import Kernel, Source
from pallas_kernels.latent_kernel.launch import build
from pallas_kernels.latent_kernel.results import results
from pallas_kernels.latent_kernel.schedule import (
    TILE,
    Geometry,
    Schedule,
    filled_heads,
    shares_that_fit,
)
from pallas_kernels.mosaic.jax_versions import honours_register_requests
from pallas_kernels.sparse_attention.mosaic_exchange import PAIR, PairExchange
from pallas_kernels.sparse_attention.mosaic_pair_producer import PairProducer
from pallas_kernels.sparse_attention.mosaic_producer import Gatherer
from pallas_kernels.sparse_attention.mosaic_records import PIECE

# Registers per thread of consumers and producer. The producer holds half a tile of bytes between its load and store.
_REGISTERS = {"bytes": (208, 88), "numbers": (216, 72)}
# The same for pairs of blocks, whose producer holds its part of the next tile, for both blocks.
_PAIR_REGISTERS = {"bytes": (208, 88), "numbers": (200, 104)}


def why_not(arrays: SparseArrays, options: LatentOptions) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can; reads shapes and dtypes only."""
    return why_not_mosaic() or _refusal(arrays.q, arrays.records, options.value_dim)


def _refusal(q: ArrayOrStruct, records: ArrayOrStruct, value_dim: int) -> str | None:
    if value_dim not in (256, 512):
        return f"value_dim must be 256 or 512, got {value_dim}"
    size = records.shape[-1] * records.dtype.itemsize
    if size % PIECE:
        return f"a record must be a multiple of {PIECE} bytes, got {size}"
    if records.dtype == jnp.uint8 and q.dtype != jnp.bfloat16:
        return f"with uint8 records, whose rotary parts are bfloat16, q must be bfloat16, got {q.dtype}"
    if q.shape[0] > MOST_ON_AN_AXIS:
        return f"at most {MOST_ON_AN_AXIS} tokens in a call, got {q.shape[0]}"
    return _geometry(q, value_dim).refusal()


def _geometry(q: ArrayOrStruct, value_dim: int) -> Geometry:
    """Returns the geometry; its page size is nominal, since records are gathered one by one."""
    heads = filled_heads(q.shape[1])
    return Geometry(heads, q.shape[2], value_dim, TILE, q.dtype, packed=False)


def schedule_of(geometry: Geometry, tokens: int, topk: int) -> Schedule:
    """Returns the split-K schedule, from static shapes only; a pair is already a cluster, so it has parts only."""
    if geometry.blocks != PAIR:
        return Schedule.by_rule(geometry, tokens, topk)
    return Schedule(1, max(1, shares_that_fit(PAIR * tokens, topk)))


def sparse_attention(
    arrays: SparseArrays,
    options: LatentOptions,
    *,
    return_lse: bool = False,
    interpret: bool = False,
) -> (
    Float[Array, "tokens heads value_dim"]
    | tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]
):
    """Implements `api.sparse_attention`.

    Slots past a token's count may have any value. With `interpret` the kernel runs in Pallas's interpreter on the CPU,
    slowly; reads out of bounds raise, and races are recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    check_kernel(_refusal(arrays.q, arrays.records, options.value_dim))
    geometry = _geometry(arrays.q, options.value_dim)
    schedule = schedule_of(geometry, *arrays.slots.shape)
    out, lse = attend(
        arrays,
        options=options,
        schedule=schedule.without_clusters(geometry) if interpret else schedule,
        want_lse=return_lse,
        interpret=interpret,
    )
    return out if lse is None else (out, lse)


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("options", "schedule", "want_lse", "interpret"))
def attend(
    arrays: SparseArrays,
    *,
    options: LatentOptions,
    schedule: Schedule,
    want_lse: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"] | None]:
    """Runs the kernel under a schedule, then combines the parts if there are several."""
    q, records, slots, counts = arrays
    tokens, heads, width = q.shape
    geometry = _geometry(q, options.value_dim)
    rows = jnp.pad(q, ((0, 0), (0, geometry.heads - heads), (0, 0))).reshape(-1, width)
    source = _source(geometry, packed=records.dtype == jnp.uint8, interpret=interpret)
    if source.exchange is not None and schedule.cluster > 1:
        raise ValueError(
            f"a pair of blocks is already a cluster, got a schedule with clusters of {schedule.cluster}; use parts"
        )
    has_lse = want_lse or schedule.parts > 1
    kernel = Kernel(
        geometry, options.scale, schedule, tokens, has_lse, interpret, source, "sparse_attention"
    )
    outputs = build(kernel, tokens)(rows, records, slots, counts)
    return results(geometry, schedule, outputs, q, want_lse=want_lse)


def _source(geometry: Geometry, *, packed: bool, interpret: bool) -> Source:
    """Returns the source of tiles; `packed` means uint8 records. The interpreter does not support pairs."""
    arrays, kind = ("records", "slots", "seq_lens"), "bytes" if packed else "numbers"
    if geometry.blocks != PAIR or interpret or not honours_register_requests():
        return Source(arrays, Gatherer, (1, 1), _REGISTERS[kind])
    return Source(arrays, PairProducer, (1, 1), _PAIR_REGISTERS[kind], exchange=PairExchange())

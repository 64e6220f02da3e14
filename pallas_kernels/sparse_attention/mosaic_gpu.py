"""`sparse_attention` as a Mosaic GPU kernel for Hopper: what it takes, and what XLA does around it.

The kernel is that of `latent_attention` with another producer: a token is a row of one query, and its tiles are
gathered from the records at its slots instead of copied from pages: by each block for itself (mosaic_producer.py), or
by the two blocks of 128 heads for each other (mosaic_pair_producer.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import MOST_ON_AN_AXIS, why_not_mosaic
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
from pallas_kernels.sparse_attention.mosaic_exchange import PAIR, PairExchange
from pallas_kernels.sparse_attention.mosaic_pair_producer import Sharer
from pallas_kernels.sparse_attention.mosaic_producer import Gatherer
from pallas_kernels.sparse_attention.mosaic_records import PIECE

# Registers of each thread of consumers and producer, which holds half a tile of bytes between loading and storing it.
_REGISTERS = {"bytes": (208, 88), "numbers": (216, 72)}
# Those of blocks in pairs, whose producer holds what both blocks get of the next tile.
_PAIR_REGISTERS = {"bytes": (208, 88), "numbers": (200, 104)}


def why_not(
    q: ArrayOrStruct,
    records: ArrayOrStruct,
    slots: ArrayOrStruct,
    counts: ArrayOrStruct,
    *,
    value_dim: int,
) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or _refusal(q, records, value_dim)


def _refusal(q: ArrayOrStruct, records: ArrayOrStruct, value_dim: int) -> str | None:
    if value_dim not in (256, 512):
        return f"value_dim must be 256 or 512, got {value_dim}"
    size = records.shape[-1] * records.dtype.itemsize
    if size % PIECE:
        return f"a record must be a multiple of {PIECE} bytes, got {size}"
    if records.dtype == jnp.uint8 and q.dtype != jnp.bfloat16:
        return f"records of bytes hold rotary parts in bfloat16, so q must be that, got {q.dtype}"
    if q.shape[0] > MOST_ON_AN_AXIS:
        return f"at most {MOST_ON_AN_AXIS} tokens in a call, got {q.shape[0]}"
    return _geometry(q, value_dim).refusal()


def _geometry(q: ArrayOrStruct, value_dim: int) -> Geometry:
    """Returns the sizes; pages mean nothing where tokens are gathered one by one."""
    heads = filled_heads(q.shape[1])
    return Geometry(heads, q.shape[2], value_dim, TILE, q.dtype, packed=False)


def schedule_of(geometry: Geometry, tokens: int, topk: int) -> Schedule:
    """Chooses how keys are shared out: a function of static shapes only; blocks in pairs are no other clusters."""
    if geometry.blocks != PAIR:
        return Schedule.by_rule(geometry, tokens, topk)
    return Schedule(1, max(1, shares_that_fit(PAIR * tokens, topk)))


def sparse_attention(
    q: Float[Array, "tokens heads latent_and_rope"],
    records: Shaped[Array, "pages page_size 1 width"],
    slots: Int[Array, "tokens topk"],
    counts: Int[Array, " tokens"],
    *,
    value_dim: int,
    scale: float,
    return_lse: bool = False,
    interpret: bool = False,
) -> (
    Float[Array, "tokens heads value_dim"]
    | tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]
):
    """Attends from all heads of a token to the records at its slots, as `api.sparse_attention` says.

    Slots past a token's count may be any number. With `interpret` it runs on the CPU, slowly; reads out of bounds
    raise, and races are recorded.

    Raises:
        ValueError: this kernel cannot take the shapes or dtypes.
    """
    refusal = _refusal(q, records, value_dim)
    if refusal is not None:
        raise ValueError(f"the Mosaic GPU kernel cannot take this: {refusal}")
    geometry = _geometry(q, value_dim)
    schedule = schedule_of(geometry, q.shape[0], slots.shape[1])
    out, lse = attend(
        q,
        records,
        slots,
        counts,
        value_dim=value_dim,
        scale=scale,
        schedule=schedule.without_clusters(geometry) if interpret else schedule,
        want_lse=return_lse,
        interpret=interpret,
    )
    return out if lse is None else (out, lse)


# The layers of a model call this many times with equal shapes: under its own jit the kernel is lowered once.
@partial(jax.jit, static_argnames=("value_dim", "scale", "schedule", "want_lse", "interpret"))
def attend(
    q: Float[Array, "tokens heads latent_and_rope"],
    records: Shaped[Array, "pages page_size 1 width"],
    slots: Int[Array, "tokens topk"],
    counts: Int[Array, " tokens"],
    *,
    value_dim: int,
    scale: float,
    schedule: Schedule,
    want_lse: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"] | None]:
    """Runs the kernel under a given schedule, then joins the parts if there are several."""
    tokens, heads, width = q.shape
    geometry = _geometry(q, value_dim)
    rows = jnp.pad(q, ((0, 0), (0, geometry.heads - heads), (0, 0))).reshape(-1, width)
    source = _source(geometry, packed=records.dtype == jnp.uint8, interpret=interpret)
    if source.exchange is not None and schedule.cluster > 1:
        raise ValueError(
            f"blocks in pairs share keys in parts, got a cluster of {schedule.cluster}"
        )
    has_lse = want_lse or schedule.parts > 1
    kernel = Kernel(
        geometry, scale, schedule, tokens, has_lse, interpret, source, "sparse_attention"
    )
    outputs = build(kernel, tokens)(rows, records, slots, counts)
    return results(geometry, schedule, outputs, q, want_lse=want_lse)


def _source(geometry: Geometry, *, packed: bool, interpret: bool) -> Source:
    """Returns who gathers records, of bytes if they are `packed`; the interpreter lets no blocks share anything."""
    arrays, kind = ("records", "slots", "seq_lens"), "bytes" if packed else "numbers"
    if geometry.blocks != PAIR or interpret:
        return Source(arrays, Gatherer, (1, 1), _REGISTERS[kind])
    return Source(arrays, Sharer, (1, 1), _PAIR_REGISTERS[kind], exchange=PairExchange())

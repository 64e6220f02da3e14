"""`ragged_attention` on Hopper with a Mosaic GPU kernel: limits, and the XLA operations before and after the kernel.

mosaic_tiles.py cuts queries into tiles, mosaic_unpack.py converts 8-bit pages, mosaic_launch.py launches the kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import ROW_TILE, why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.ragged_attention.mosaic_kernel import Kernel
from pallas_kernels.ragged_attention.mosaic_launch import build
from pallas_kernels.ragged_attention.mosaic_schedule import Geometry, Schedule, most_tiles
from pallas_kernels.ragged_attention.mosaic_tiles import cut, lse_of_tokens
from pallas_kernels.ragged_attention.mosaic_unpack import unpack
from pallas_kernels.ragged_attention.mosaic_unpack import why_not as why_not_unpack


def why_not(q: ArrayOrStruct, k_pages: ArrayOrStruct) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or Geometry.of(q, k_pages).refusal()


def why_fall_back(k_pages: ArrayOrStruct, page_table: ArrayOrStruct) -> str | None:
    """Returns why a call with these tables must run in plain XLA instead, or `None` if the kernel can run it.

    This is separate from `why_not`, because a model chooses its implementations before table sizes are known.
    """
    return why_not_unpack(k_pages, page_table) if k_pages.dtype.itemsize == 1 else None


def ragged_attention(
    arrays: AttentionArrays,
    options: ScoreOptions,
    *,
    return_lse: bool = False,
    interpret: bool = False,
) -> (
    Float[Array, "tokens heads head_dim"]
    | tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]
):
    """Implements `api.ragged_attention`.

    Page ids past a row's last page, or before the first key that any of its queries sees, may have any value. With
    `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly; reads out of bounds raise, and races are
    recorded.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    geometry = Geometry.of(arrays.q, arrays.k_pages)
    check_kernel(geometry.refusal())
    tokens, rows = arrays.q.shape[0], arrays.seq_lens.shape[0]
    out, lse = attend(
        arrays,
        options=options,
        schedule=Schedule.of(geometry, tokens, rows, options.window),
        want_lse=return_lse,
        interpret=interpret,
    )
    return out if lse is None else (out, lse)


@dataclass(frozen=True)
class DirectLaunch:
    """The kernel's launch without XLA operations per layer, for a caller such as the torch bridge.

    Attributes:
        launch: function of `(q, k_pages, v_pages, page_table, tiles, count)`, followed by the scales of 8-bit pages and
            by sinks if there are any. The caller converts 8-bit pages, as `mosaic_unpack.unpack` does.
        plan: function of `(seq_lens, cu_q_lens)` that computes tiles and count, once per step for all layers.
        keys: number of keys in a tile, by which scales of 8-bit pages are arranged.
        pack: heads in one row of sinks, which are float32 [heads // pack, pack * repeats].
        repeats: how often each head's sink stands there, one after the other.
    """

    launch: Callable[..., Array]
    plan: Callable[..., tuple[Array, Array]]
    keys: int
    pack: int
    repeats: int


def direct_launch(
    q: ArrayOrStruct,
    k_pages: ArrayOrStruct,
    page_table: ArrayOrStruct,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
) -> DirectLaunch | None:
    """Returns the kernel's launch without XLA operations per layer.

    The result is `None` if the kernel cannot run here, if the copies of 8-bit pages would be too large, or if the
    number of tokens is not a multiple of 8, for which XLA pads the queries.

    Args:
        q: the queries, or their `jax.ShapeDtypeStruct`.
        k_pages: the key pool, or its `jax.ShapeDtypeStruct`; the value pool has the same shape and dtype.
        page_table: the page table, or its `jax.ShapeDtypeStruct`.
        scale: as in `ragged_attention`.
        window: as in `ragged_attention`. Pass `None` for a window of at least a row's capacity: position arithmetic is
            in int32.
        soft_cap: as in `ragged_attention`.
        has_sinks: whether sinks are an argument.
    """
    geometry, tokens, rows = Geometry.of(q, k_pages), q.shape[0], page_table.shape[0]
    if why_not_mosaic() or geometry.refusal() or tokens % ROW_TILE:
        return None
    if why_fall_back(k_pages, page_table) is not None:
        return None
    schedule = Schedule.of(geometry, tokens, rows, window)
    per_tile = geometry.tokens_per_tile
    num_tiles = most_tiles(tokens, rows, per_tile)
    plan = partial(
        cut,
        tokens=tokens,
        tokens_per_tile=per_tile,
        num_tiles=num_tiles,
        keys=schedule.keys,
        window=window,
    )
    options = ScoreOptions(scale, window, soft_cap)
    kernel = Kernel(geometry, options, schedule, num_tiles, False, has_sinks, False)
    launch = build(kernel, tokens)
    return DirectLaunch(
        launch=lambda *arrays: launch(*arrays)[0],
        plan=plan,
        keys=schedule.keys,
        pack=geometry.pack,
        repeats=geometry.tokens_per_consumer,
    )


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames=("options", "schedule", "want_lse", "interpret"))
def attend(
    arrays: AttentionArrays,
    *,
    options: ScoreOptions,
    schedule: Schedule,
    want_lse: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"] | None]:
    """Runs the kernel under a schedule."""
    q, k_pages, v_pages, page_table, seq_lens, cu_q_lens, sinks, k_scales, v_scales = arrays
    assert cu_q_lens is not None
    geometry, tokens = Geometry.of(q, k_pages), q.shape[0]
    per_tile = geometry.tokens_per_tile
    num_tiles = most_tiles(tokens, seq_lens.shape[0], per_tile)
    tiles, count = cut(
        seq_lens,
        cu_q_lens,
        tokens=tokens,
        tokens_per_tile=per_tile,
        num_tiles=num_tiles,
        keys=schedule.keys,
        window=options.window,
    )
    # Copies transfer whole tiles of 8 rows. TMA clips the last tile of queries at the array's end; the interpreter does
    # not, so its array gets one more tile.
    reach = ceil(tokens / ROW_TILE) * ROW_TILE + per_tile * interpret
    scales: list[Array] = []
    if k_scales is not None and v_scales is not None:
        k_pages, v_pages, page_table, *scales = unpack(
            *(k_pages, v_pages, page_table, seq_lens, cu_q_lens, k_scales, v_scales),
            keys=schedule.keys,
            window=options.window,
        )
    operands = [jnp.pad(q, ((0, reach - tokens), (0, 0), (0, 0))), k_pages, v_pages]
    operands += [page_table, tiles, count, *scales]
    if sinks is not None:
        by_unit = sinks.astype(jnp.float32).reshape(geometry.units, geometry.pack)
        operands.append(jnp.repeat(by_unit, geometry.tokens_per_consumer, axis=1))
    kernel = Kernel(geometry, options, schedule, num_tiles, want_lse, sinks is not None, interpret)
    outputs = build(kernel, reach)(*operands)
    out = outputs[0][:tokens]
    if not want_lse:
        return out, None
    lse = lse_of_tokens(
        outputs[1], cu_q_lens, tokens=tokens, tokens_per_tile=per_tile, pack=geometry.pack
    )
    return out, lse

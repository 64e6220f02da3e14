"""`ragged_attention` as a Mosaic GPU kernel for Hopper: what it takes, and what XLA does around it.

How queries are cut into tiles is in mosaic_tiles.py, what becomes of 8-bit pages in mosaic_unpack.py, the kernel in
mosaic_launch.py and what that imports.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.device import ROW_TILE, why_not_mosaic
from pallas_kernels.mosaic.scores import Options
from pallas_kernels.ragged_attention.mosaic_kernel import Kernel
from pallas_kernels.ragged_attention.mosaic_launch import build
from pallas_kernels.ragged_attention.mosaic_schedule import Geometry, Schedule, most_tiles
from pallas_kernels.ragged_attention.mosaic_tiles import cut, lse_of_tokens
from pallas_kernels.ragged_attention.mosaic_unpack import unpack
from pallas_kernels.ragged_attention.mosaic_unpack import why_not as why_not_unpack


def why_not(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    seq_lens: Array,
    cu_q_lens: Array,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or Geometry.of(q, k_pages).refusal()


def why_hand_on(k_pages: Array, page_table: Array) -> str | None:
    """Returns why a call with tables as large as these is better run in plain XLA, or `None` if it is not.

    It is no refusal: a whole model is told what runs before its tables have a size.
    """
    return why_not_unpack(k_pages, page_table) if k_pages.dtype.itemsize == 1 else None


def ragged_attention(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    v_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    k_scales: Float[Array, "pages page_size kv_heads"] | None = None,
    v_scales: Float[Array, "pages page_size kv_heads"] | None = None,
    return_lse: bool = False,
    interpret: bool = False,
) -> (
    Float[Array, "tokens heads head_dim"]
    | tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"]]
):
    """Attends from packed queries to the keys in their rows' pages, as `api.ragged_attention` says.

    Page ids past a row's last page, or before the first key that any of its queries sees, may be any number. With
    `interpret` it runs on the CPU, slowly; reads out of bounds raise, and races are recorded.

    Raises:
        ValueError: this kernel cannot take the shapes or dtypes.
    """
    refusal = Geometry.of(q, k_pages).refusal()
    if refusal is not None:
        raise ValueError(f"the Mosaic GPU kernel cannot take this: {refusal}")
    geometry = Geometry.of(q, k_pages)
    out, lse = attend(
        q,
        k_pages,
        v_pages,
        page_table,
        seq_lens,
        cu_q_lens,
        sinks,
        k_scales,
        v_scales,
        options=Options(scale=scale, window=window, soft_cap=soft_cap),
        schedule=Schedule.of(geometry, q.shape[0], seq_lens.shape[0], window),
        want_lse=return_lse,
        interpret=interpret,
    )
    return out if lse is None else (out, lse)


def alone(
    q: Any,  # noqa: ANN401
    k_pages: Any,  # noqa: ANN401
    rows: int,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Callable[..., Array], Callable[..., tuple[Array, Array]]] | None:
    """Returns the launch by itself, for a runtime other than XLA, or `None` if XLA has to prepare anything per layer.

    Args:
        q: the queries, or their `jax.ShapeDtypeStruct`.
        k_pages: likewise for the key pool, which the value pool is like.
        rows: of the page table.
        scale: as in `ragged_attention`.
        window: likewise; `None` rather than one of all that a row can hold, since what is counted with it has 32 bits.
        soft_cap: likewise.

    Returns:
        A function of `(q, k_pages, v_pages, page_table, tiles, count)`, and one that makes tiles and their count of
        `(seq_lens, cu_q_lens)`, which all layers of a step share.
    """
    geometry, tokens = Geometry.of(q, k_pages), q.shape[0]
    if why_not_mosaic() or geometry.refusal() or geometry.scaled or tokens % ROW_TILE:
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
    options = Options(scale=scale, window=window, soft_cap=soft_cap)
    kernel = Kernel(geometry, options, schedule, num_tiles, False, False, False)
    launch = build(kernel, tokens)
    return lambda *arrays: launch(*arrays)[0], plan


# The layers of a model call this many times with equal shapes: under its own jit the kernel is lowered once.
@partial(jax.jit, static_argnames=("options", "schedule", "want_lse", "interpret"))
def attend(
    q: Float[Array, "tokens heads head_dim"],
    k_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    v_pages: Shaped[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "rows table_width"],
    seq_lens: Int[Array, " rows"],
    cu_q_lens: Int[Array, " row_bounds"],
    sinks: Float[Array, " heads"] | None,
    k_scales: Float[Array, "pages page_size kv_heads"] | None = None,
    v_scales: Float[Array, "pages page_size kv_heads"] | None = None,
    *,
    options: Options,
    schedule: Schedule,
    want_lse: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "tokens heads"] | None]:
    """Runs the kernel under a given schedule."""
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
    # Copies take whole tiles of rows; the last one of queries may reach past the end, if not in the interpreter.
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

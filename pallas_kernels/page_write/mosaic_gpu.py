"""`page_write` on Hopper with a Mosaic GPU kernel: a block copies one token's row of every pool through registers."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.launch import LANE_PARAMS, mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import Piece, flat_pieces, flat_registers

# Most registers per thread for the copied rows; the rest of 255 is for addresses.
MOST_REGISTERS = 128


def why_not(
    pages: tuple[ArrayOrStruct, ...],
    values: tuple[ArrayOrStruct, ...],
    slots: Int[ArrayOrStruct, " tokens"],
) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    del values, slots  # Values are cast to the pools' dtypes, and any number of slots will do.
    return why_not_mosaic() or refusal(pages)


def refusal(pages: tuple[ArrayOrStruct, ...]) -> str | None:
    """Returns why the kernel cannot be built for these pools, or `None` if it can."""
    for pool in pages:
        if pool.dtype.itemsize > 4 or pool.dtype == jnp.bool_:
            return f"elements must have 1, 2 or 4 bytes, got {pool.dtype}"
        if pool.size == 0:
            return f"pools must not be empty, got shape {list(pool.shape)}"
    registers = sum(flat_registers(prod(pool.shape[2:]), pool.dtype.itemsize) for pool in pages)
    if registers > MOST_REGISTERS:
        return (
            f"a token's rows may take {MOST_REGISTERS} registers per thread (4 bytes each, or 1 element each in "
            f"rows of odd length), got {registers}"
        )
    return None


def page_write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    values: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int[Array, " tokens"],
    *,
    interpret: bool = False,
) -> tuple[Shaped[Array, "pages page_size ..."], ...]:
    """Implements `api.page_write`; negative slots write nothing, too.

    With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly; races are recorded.

    Raises:
        ValueError: the kernel does not support the pools.
    """
    check_kernel(refusal(pages))
    return write(pages, values, slots, interpret=interpret) if len(slots) else pages


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames="interpret")
def write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    values: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int[Array, " tokens"],
    *,
    interpret: bool,
) -> tuple[Shaped[Array, "pages page_size ..."], ...]:
    """Runs the kernel."""
    tokens = slots.shape[0]
    # Flatten each token's entry to one row.
    refs = [jax.new_ref(pool.reshape(*pool.shape[:2], -1)) for pool in pages]
    rows = [
        value.reshape(tokens, -1).astype(pool.dtype)
        for pool, value in zip(pages, values, strict=True)
    ]
    _kernel(tokens, interpret=interpret)(slots, *rows, *refs)
    return tuple(jax.freeze(ref).reshape(pool.shape) for ref, pool in zip(refs, pages, strict=True))


def direct_launch(
    pages: tuple[ArrayOrStruct, ...],
    values: tuple[ArrayOrStruct, ...],
    slots: Int[ArrayOrStruct, " tokens"],
) -> Callable[..., tuple[Array, ...]] | None:
    """Returns the kernel's launch without XLA operations around it, or `None` if the kernel cannot run here.

    Args:
        pages: the pools, or their `jax.ShapeDtypeStruct`s.
        values: each pool's values, in the pool's dtype.
        slots: as in `page_write`.

    Returns:
        A function of the slots, each pool's values, [tokens, elements], and then the pools, [pages, page_size,
        elements]. The caller passes its own buffers, and the kernel writes into the pools in place.
    """
    return None if why_not(pages, values, slots) else _launch


def _launch(slots: Int[Array, " tokens"], *rows_and_pools: Array) -> tuple[Array, ...]:
    """Launches the kernel on flattened values and pools."""
    count = len(rows_and_pools) // 2
    refs = [jax.new_ref(pool) for pool in rows_and_pools[count:]]
    _kernel(slots.shape[0], interpret=False)(slots, *rows_and_pools[:count], *refs)
    return tuple(map(jax.freeze, refs))


def _kernel(tokens: int, *, interpret: bool) -> Callable[..., None]:
    return mosaic_kernel(
        _copy_rows,
        out_type=(),
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=LANE_PARAMS,
        interpret=interpret,
        kernel_name="page_write",
    )


def _copy_rows(slots: Ref, *rows_and_pools: Ref) -> None:
    """Copies the rows of one token; all loads are issued before the first store."""
    count = len(rows_and_pools) // 2
    rows, pools = rows_and_pools[:count], rows_and_pools[count:]
    num_pages, page_size = pools[0].shape[:2]
    token = lax.axis_index("token")
    slot = slots[token]
    pieces = [flat_pieces(pool.shape[2], pool.dtype.itemsize) for pool in pools]
    loaded = [
        [_load(row.at[token], piece) for piece in cut]
        for row, cut in zip(rows, pieces, strict=True)
    ]

    @pl.when((slot >= 0) & (slot < num_pages * page_size))
    def _() -> None:
        page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
        for pool, cut, parts in zip(pools, pieces, loaded, strict=True):
            for piece, part in zip(cut, parts, strict=True):
                assign(pool, (page, offset, _where(piece)), part)


def _load(row: Ref, piece: Piece) -> Array:
    if piece.size == 1:
        return row[piece.start]
    return plgpu.load(row.at[_where(piece)], layout=piece.layout, optimized=False)


def _where(piece: Piece) -> Any:  # noqa: ANN401 - an index or a private type of JAX
    """Returns a piece's index; a single element is a scalar index, since Mosaic infers no layout for vectors of one."""
    return piece.start if piece.size == 1 else pl.ds(piece.start, piece.size)

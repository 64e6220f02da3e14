"""`page_write` as one Mosaic GPU kernel for Hopper: a block copies one token's rows, of every pool."""

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
from pallas_kernels.mosaic.launch import LANE_PARAMS, interpreter
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import Piece, flat_pieces, flat_registers

# Registers of a thread that hold rows on their way; the rest of 255 is for addresses.
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
            return f"numbers must have 1, 2 or 4 bytes, got {pool.dtype}"
        if pool.size == 0:
            return f"pools must hold something, got shape {list(pool.shape)}"
    registers = sum(flat_registers(prod(pool.shape[2:]), pool.dtype.itemsize) for pool in pages)
    if registers > MOST_REGISTERS:
        return (
            f"a token's rows may take {MOST_REGISTERS} registers of each thread (4 bytes each; odd "
            f"rows 1 number each), got {registers}"
        )
    return None


def page_write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    values: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int[Array, " tokens"],
    *,
    interpret: bool = False,
) -> tuple[Shaped[Array, "pages page_size ..."], ...]:
    """Writes as `api.page_write` says, in place where the pages are donated; negative slots write nothing either.

    With `interpret` it runs on the CPU, slowly; races are recorded.

    Raises:
        ValueError: this kernel cannot take the pools.
    """
    reason = refusal(pages)
    if reason is not None:
        raise ValueError(f"the Mosaic GPU kernel cannot take this: {reason}")
    return write(pages, values, slots, interpret=interpret) if len(slots) else pages


# The layers of a model call this many times with equal shapes: under its own jit the kernel is lowered once.
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
    # A row of whatever shape is a row of numbers.
    refs = [jax.new_ref(pool.reshape(*pool.shape[:2], -1)) for pool in pages]
    rows = [
        value.reshape(tokens, -1).astype(pool.dtype)
        for pool, value in zip(pages, values, strict=True)
    ]
    _kernel(tokens, interpret=interpret)(slots, *rows, *refs)
    return tuple(jax.freeze(ref).reshape(pool.shape) for ref, pool in zip(refs, pages, strict=True))


def alone(slots: Int[Array, " tokens"], *rows_and_pools: Array) -> tuple[Array, ...]:
    """Launches the kernel by itself, for a runtime other than XLA, which writes into the pools that it is given.

    Args:
        slots: as in `page_write`.
        *rows_and_pools: the values of each pool, [tokens, numbers], of its dtype, and then the pools,
            [pages, page_size, numbers].
    """
    count = len(rows_and_pools) // 2
    refs = [jax.new_ref(pool) for pool in rows_and_pools[count:]]
    _kernel(slots.shape[0], interpret=False)(slots, *rows_and_pools[:count], *refs)
    return tuple(map(jax.freeze, refs))


def _kernel(tokens: int, *, interpret: bool) -> Callable[..., None]:
    return plgpu.kernel(
        _copy_rows,
        out_type=(),
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=LANE_PARAMS,
        interpret=interpreter(interpret),
        kernel_name="page_write",
    )


def _copy_rows(slots: Ref, *rows_and_pools: Ref) -> None:
    """Copies the rows of one token; all loads are sent before the first store waits for one."""
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
                pool[page, offset, _where(piece)] = part


def _load(row: Ref, piece: Piece) -> Array:
    if piece.size == 1:
        return row[piece.start]
    return plgpu.load(row.at[_where(piece)], layout=piece.layout, optimized=False)


def _where(piece: Piece) -> Any:  # noqa: ANN401 - an index or a private type of JAX
    """A single number is stored as a scalar: vectors of one are taken for scalars whose layout nobody knows."""
    return piece.start if piece.size == 1 else pl.ds(piece.start, piece.size)

"""`group_rows` on Hopper with a Mosaic GPU kernel: each block finds the rows of a few tokens, and copies these there.

A block counts the pairs of each group, all of them and those before its tile. Sums of the counts are the rows of the
tile's first pairs. Tokens of a tile follow one another, so the order is that of a stable sort. A row of x is read once
and written for each group that its token chooses.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import NUM_MULTIPROCESSORS, why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.group_rows.mosaic_places import Plan, find_starts, place_token
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.per_thread import run_threads, thread_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import LOAD_BYTES, flat_pieces, load
from pallas_kernels.mosaic.warps import WARPS

MOST_GROUPS, MOST_ROWS = 1024, 2**17
MOST_ROW_BYTES = 2**15
"""Most bytes of a row of x, of which a block has two in registers."""


def why_not(x: ArrayOrStruct, chosen: ArrayOrStruct, groups: int) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(x, chosen, groups)


def refusal(x: ArrayOrStruct, chosen: ArrayOrStruct, groups: int) -> str | None:
    """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
    rows, itemsize = chosen.shape[0] * chosen.shape[1], x.dtype.itemsize
    row_bytes = x.shape[1] * itemsize
    if rows > MOST_ROWS or groups > MOST_GROUPS:
        return f"there must be at most {MOST_ROWS} rows and {MOST_GROUPS} groups; got {rows} and {groups}"
    if itemsize not in (2, 4) or not 0 < row_bytes <= MOST_ROW_BYTES or row_bytes % LOAD_BYTES:
        needed = f"a multiple of {LOAD_BYTES} bytes, at most {MOST_ROW_BYTES}"
        return f"x must have 16 or 32 bits, and rows of {needed}, got {x.dtype} [{x.shape[1]}]"
    return None


@partial(jax.jit, static_argnames=("groups", "blocks", "interpret"))
def group_rows(
    x: Shaped[Array, "tokens width"],
    chosen: Int32[Array, "tokens count"],
    *,
    groups: int,
    blocks: int = NUM_MULTIPROCESSORS,
    interpret: bool = False,
) -> tuple[
    Shaped[Array, "rows width"],
    Int32[Array, " rows"],
    Int32[Array, "tokens count"],
    Int32[Array, " groups"],
]:
    """Implements `api.group_rows`, with at most `blocks` blocks.

    With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly.

    Raises:
        ValueError: the kernel does not support the sizes.
    """
    check_kernel(refusal(x, chosen, groups))
    tokens, count = chosen.shape
    plan = Plan.of(tokens, count, groups, blocks)
    found, row_groups, places, sizes = thread_kernel(
        partial(_run_block, plan, interpret),
        [
            jax.ShapeDtypeStruct((plan.pairs, x.shape[1]), x.dtype),
            *(
                jax.ShapeDtypeStruct((size,), jnp.int32)
                for size in (plan.pairs, plan.pairs, groups)
            ),
        ],
        name="group_rows",
        blocks=plan.blocks,
        scratch=(*plan.scratch, WARPS),
        is_alone=True,
        interpret=interpret,
    )(x, chosen.reshape(-1))
    return found, row_groups, places.reshape(tokens, count), sizes


def _run_block(
    plan: Plan,
    interpret: bool,
    x: Ref,
    chosen: Ref,
    out: Ref,
    row_groups: Ref,
    places: Ref,
    sizes: Ref,
    counts: Ref,
    rows: Ref,
    sums: Ref,
) -> None:
    """Finds and copies the block's share of the rows of a tile's tokens.

    A token's row of x is loaded while the rows of the token before are stored, the first one while pairs are counted.
    """
    block = lax.axis_index("block")
    first = lax.div(block, jnp.int32(plan.shares)) * plan.tile
    share = lax.rem(block, jnp.int32(plan.shares))
    turns = jnp.minimum(plan.tile, plan.tokens - first)
    pieces = flat_pieces(x.shape[1], jnp.dtype(x.dtype).itemsize)
    run = partial(run_threads, interpret=interpret)

    def load_row(token: Array) -> list[Array]:
        return [load(x.at[token, pl.ds(piece.start, piece.size)], piece.layout) for piece in pieces]

    def copy_token(turn: Array, row: list[Array]) -> list[Array]:
        place = partial(place_token, plan=plan)
        run(place, (row_groups, places, counts, rows), first, share, turn)
        following = load_row(first + jnp.minimum(turn + 1, turns - 1))

        def copy(part: Array, carry: None) -> None:
            target = rows[turn * plan.count + share + part * plan.shares]
            for piece, numbers in zip(pieces, row, strict=True):
                assign(out, (target, pl.ds(piece.start, piece.size)), numbers)
            return carry

        copies = lax.div(plan.count - share + (plan.shares - 1), jnp.int32(plan.shares))
        lax.fori_loop(jnp.int32(0), copies, copy, None)
        return following

    row = load_row(first)
    run(partial(find_starts, plan=plan), (chosen, sizes, counts, rows, sums), first, share)
    lax.fori_loop(jnp.int32(0), turns, copy_token, row)

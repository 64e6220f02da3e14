"""`group_rows` on Hopper with a Mosaic GPU kernel, for few tokens: every block finds all places, and copies some rows.

A group's tokens are bits of a few words in shared memory, which all pairs of a token and a group set at once. The
number of set bits is the group's size, and the number of those of earlier tokens a pair's place in its group.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import NUM_MULTIPROCESSORS, why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.per_thread import THREADS, Threads, run_threads, thread_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import LOAD_BYTES, flat_pieces, load
from pallas_kernels.mosaic.warps import WARPS

MOST_TOKENS, MOST_GROUPS, MOST_ROWS = 256, 1024, 4096

_BITS = 32
"""Tokens of a word."""


def why_not(x: ArrayOrStruct, chosen: ArrayOrStruct, groups: int) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(x, chosen, groups)


def refusal(x: ArrayOrStruct, chosen: ArrayOrStruct, groups: int) -> str | None:
    """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
    (tokens, width), rows = x.shape, chosen.shape[0] * chosen.shape[1]
    if tokens > MOST_TOKENS or rows > MOST_ROWS or groups > MOST_GROUPS:
        limits = f"{MOST_TOKENS} tokens, {MOST_ROWS} rows and {MOST_GROUPS} groups"
        return f"there must be at most {limits}; got {tokens}, {rows} and {groups}"
    if x.dtype.itemsize not in (2, 4) or not width or width * x.dtype.itemsize % LOAD_BYTES:
        return f"x must have 16 or 32 bits, and rows of a multiple of {LOAD_BYTES} bytes, got {x.dtype} [{width}]"
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
    rows, width = tokens * count, x.shape[1]
    blocks = min(rows, blocks)
    words = ceil(tokens / _BITS)
    code = partial(_find_places, pairs=rows, count=count, groups=groups, words=words)
    found, row_groups, places, sizes = thread_kernel(
        partial(_run_block, code, blocks, interpret),
        [
            jax.ShapeDtypeStruct((rows, width), x.dtype),
            *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (rows, rows, groups)),
        ],
        name="group_rows",
        blocks=blocks,
        scratch=(*map(_whole, (groups * words, groups, rows)), WARPS),
        interpret=interpret,
    )(x, chosen.reshape(-1))
    return found, row_groups, places.reshape(tokens, count), sizes


def _run_block(
    code: Callable[..., None],
    blocks: int,
    interpret: bool,
    x: Ref,
    chosen: Ref,
    out: Ref,
    row_groups: Ref,
    places: Ref,
    sizes: Ref,
    *scratch: Ref,
) -> None:
    """Finds all places, then copies the rows block, block + blocks, ..."""
    (rows, width), block, row_tokens = out.shape, lax.axis_index("block"), scratch[2]
    run_threads(code, (chosen, row_groups, places, sizes, *scratch), block, interpret=interpret)

    def copy(turn: Array, carry: None) -> None:
        row = block + turn * blocks
        token = row_tokens[row]
        for piece in flat_pieces(width, jnp.dtype(x.dtype).itemsize):
            span = pl.ds(piece.start, piece.size)
            assign(out, (row, span), load(x.at[token, span], piece.layout))
        return carry

    turns = lax.div(rows - block + (blocks - 1), jnp.int32(blocks))
    lax.fori_loop(jnp.int32(0), turns, copy, None)


def _whole(size: int) -> int:
    """Returns the next multiple of the number of threads, for an array that all threads store to in step."""
    return ceil(size / THREADS) * THREADS


def _find_places(
    threads: Threads,
    chosen: Ref,
    row_groups: Ref,
    places: Ref,
    sizes: Ref,
    members: Ref,
    starts: Ref,
    row_tokens: Ref,
    sums: Ref,
    block: Any,  # noqa: ANN401 - a word
    *,
    pairs: int,
    count: int,
    groups: int,
    words: int,
) -> None:
    """Finds the row of each pair of a token and a group; the first block writes what is found.

    Args:
        threads: the block's threads.
        chosen: the group of each pair, in the order of tokens.
        row_groups: the group of each row, written.
        places: the row of each pair, written.
        sizes: rows of each group, written.
        members: words of each group, with a bit for each of its tokens.
        starts: the first row of each group.
        row_tokens: the token of each row.
        sums: a number per warp.
        block: the block's number.
        pairs: number of pairs.
        count: groups that a token chooses.
        groups: number of groups.
        words: words of a group.
    """
    own = _mark_members(
        threads, chosen, members, row_tokens, pairs=pairs, count=count, groups=groups, words=words
    )
    writes = block == 0
    counts, total = [], threads.number * 0
    each = ceil(groups / THREADS)
    for part in range(each):
        group = threads.number * each + part
        at, size = threads.least(group, groups - 1) * words, threads.number * 0
        for word in range(words):
            size = size + threads.ones(threads.load(members, at + word))
        counts.append((group, threads.select(group < groups, size, 0)))
        total = total + counts[-1][1]
    start = threads.running_sum(total, sums) - total
    for group, size in counts:
        threads.store(starts, group, start)
        threads.store(sizes, group, size, where=writes & (group < groups))
        start = start + size
    threads.sync()
    for pair, is_pair, token, group in own:
        place = threads.load(starts, group)
        earlier = (1 << (token % _BITS)) - 1
        for word in range(words):
            bits = threads.load(members, group * words + word)
            own_word = threads.select(token // _BITS == word, bits & earlier, 0)
            place = place + threads.ones(threads.select(token // _BITS > word, bits, own_word))
        # Threads without a pair write behind all rows.
        place = threads.select(is_pair, place, pair)
        threads.store(row_tokens, place, token)
        threads.store(row_groups, place, group, where=writes & is_pair)
        threads.store(places, pair, place, where=writes & is_pair)
    threads.sync()


def _mark_members(
    threads: Threads,
    chosen: Ref,
    members: Ref,
    row_tokens: Ref,
    *,
    pairs: int,
    count: int,
    groups: int,
    words: int,
) -> list[tuple[Any, Any, Any, Any]]:
    """Sets the bits of each group's tokens; the arguments are those of `_find_places`.

    Returns:
        For each of the thread's pairs its number, whether there is such a pair, its token and its group.
    """
    for part in range(ceil(groups * words / THREADS)):
        threads.store(members, threads.number + part * THREADS, 0)
    # Rows that no pair has, as when a token chooses a group twice, are those of the first token.
    for part in range(ceil(pairs / THREADS)):
        threads.store(row_tokens, threads.number + part * THREADS, 0)
    threads.sync()
    own = []
    for part in range(ceil(pairs / THREADS)):
        pair = threads.number + part * THREADS
        is_pair, token = pair < pairs, pair // count
        group = threads.load(chosen, threads.least(pair, pairs - 1))
        # A group that is not there would be written out of bounds.
        group = threads.most(threads.least(group, groups - 1), 0)
        bit = threads.select(is_pair, 1 << (token % _BITS), 0)
        threads.set_bits(members, group * words + threads.least(token // _BITS, words - 1), bit)
        own.append((pair, is_pair, token, group))
    threads.sync()
    return own

"""`gathered_matmul` on Hopper with a Mosaic GPU kernel: a warp, or in 4 bits a block, computes columns of a row."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.gathered_matmul import mosaic_four_bits
from pallas_kernels.gathered_matmul.epilogue import SUMS, Epilogue
from pallas_kernels.gathered_matmul.geometry import MOST_ROWS, WORD, Geometry
from pallas_kernels.gathered_matmul.mosaic_ending import added_bias, group_of, store_column
from pallas_kernels.mosaic.packed_numbers import BITS
from pallas_kernels.mosaic.per_thread import LANES, WORDS, Threads, run_block, thread_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.warps import WARPS


def why_not(
    weight: ArrayOrStruct | FewBits, x: ArrayOrStruct, chosen: ArrayOrStruct, *, group_axis: int
) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(weight, x, chosen, group_axis=group_axis)


def refusal(
    weight: ArrayOrStruct | FewBits, x: ArrayOrStruct, chosen: ArrayOrStruct, *, group_axis: int
) -> str | None:
    """Returns why the kernel does not support these arrays on any device, or `None` if it does."""
    return Geometry.of(weight, x, chosen, group_axis=group_axis).refusal()


@partial(jax.jit, static_argnames=("group_axis", "epilogue", "interpret"))
def gathered_matmul(
    weight: Shaped[Array, "some others inner"] | FewBits,
    x: Float[Array, "rows_of_x inner"],
    chosen: Int32[Array, "rows count"],
    bias: Float[Array, "groups out"] | None = None,
    weights: Float32[Array, "rows count"] | None = None,
    *,
    group_axis: int = 0,
    epilogue: Epilogue = SUMS,
    interpret: bool = False,
) -> Float[Array, "results columns"]:
    """Implements `api.gathered_matmul`. With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly.

    XLA computes an epilogue that the kernel lacks, from float32 sums.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    geometry = Geometry.of(weight, x, chosen, group_axis=group_axis)
    check_kernel(geometry.refusal())
    own = epilogue if _has(epilogue) else SUMS
    has = {"bias": None if bias is None else bias.dtype, "summed": weights is not None}
    geometry = replace(geometry, **has, epilogue=own)
    results = geometry.rows * (1 if geometry.summed else geometry.count)
    code = partial(code_for(geometry), geometry=geometry)
    found = thread_kernel(
        partial(run_block, code, takes_block=True, interpret=interpret),
        jax.ShapeDtypeStruct((results * geometry.results,), own.result),
        name="gathered_matmul",
        blocks=geometry.blocks,
        scratch=mosaic_four_bits.scratch(geometry) if geometry.is_tiled else (),
        interpret=interpret,
    )(*(array.reshape(-1) for array in jax.tree.leaves((x, chosen, weights, bias, weight))))
    found = found.reshape(results, geometry.results)
    return found if own == epilogue else epilogue.applied(found)


def code_for(geometry: Geometry) -> Callable[..., None]:
    """Returns the code of a thread of a block: it takes `Threads`, the arrays, the scratch, and the block's number."""
    if geometry.is_tiled:
        return mosaic_four_bits.multiply
    return _multiply_and_add if geometry.summed else _multiply


def _has(epilogue: Epilogue) -> bool:
    """Returns whether the kernel computes an epilogue: it has no error function, and dtypes of 32 and 16 bits."""
    dtypes = jnp.float32, jnp.bfloat16, jnp.float16
    return epilogue.activation in (None, "silu", "gelu_tanh", "relu2") and epilogue.result in dtypes


def _multiply(
    threads: Threads,
    x: Ref,
    chosen: Ref,
    *others: Any,  # noqa: ANN401 - the bias, the weight, its scales, the result, and the block
    geometry: Geometry,
) -> None:
    """Writes the columns of the warp's row and choice.

    A lane multiplies every 32nd piece of 16 bytes of a row of the weight, and the warp adds up its lanes' sums. Then
    a lane has a column.
    """
    g = geometry
    bias, others = (others[0], others[1:]) if g.bias is not None else (None, others)
    weight, *factors, out, block = others
    pair, first, is_task = _task(threads, block, g)
    group = group_of(threads, chosen, pair, g)
    halves = (0, g.results) if g.epilogue.gated else (0,)
    rows = [
        g.row(group, threads.least(first + column, g.results - 1) + half)
        for half in halves
        for column in range(g.columns)
    ]
    row_of_x = pair if g.each else pair // g.count
    [products] = _products(threads, x, weight, factors, [(row_of_x, rows)], g)
    own = threads.least(first + threads.least(threads.lane, g.columns - 1), g.results - 1)
    sums = [
        _by_lane(threads, products[at : at + g.columns])
        for at in range(0, len(products), g.columns)
    ]
    is_wanted = is_task & (threads.lane < g.columns) & (first + threads.lane < g.results)
    store_column(threads, sums, pair, group, own, factors, bias, out, g, where=is_wanted)


def _multiply_and_add(
    threads: Threads,
    x: Ref,
    chosen: Ref,
    weights: Ref,
    *others: Any,  # noqa: ANN401 - as for `_multiply`
    geometry: Geometry,
) -> None:
    """Writes the columns of the warp's row: the weighted sum over its choices.

    A lane adds up its products with the rows of all choices, in their order, before the warp does.
    """
    g = geometry
    bias, others = (others[0], others[1:]) if g.bias is not None else (None, others)
    weight, *factors, out, block = others
    row, first, is_task = _task(threads, block, g)
    own = threads.least(first + threads.least(threads.lane, g.columns - 1), g.results - 1)
    columns = [threads.least(first + column, g.results - 1) for column in range(g.columns)]
    totals = [threads.lane * 0] * g.columns
    at_once = MOST_ROWS // g.columns
    for begin in range(0, g.count, at_once):
        pairs = [row * g.count + choice for choice in range(begin, min(begin + at_once, g.count))]
        groups = [group_of(threads, chosen, pair, g) for pair in pairs]
        sets = [
            (pair if g.each else row, [g.row(group, column) for column in columns])
            for pair, group in zip(pairs, groups, strict=True)
        ]
        found = _products(threads, x, weight, factors, sets, g)
        for pair, (_, rows), products in zip(pairs, sets, found, strict=True):
            share = threads.load_number(weights, pair)
            for at, (place, product) in enumerate(zip(rows, products, strict=True)):
                if g.has_row_scales:
                    product = threads.product(product, threads.load_number(factors[0], place))
                totals[at] = threads.multiply_add(product, share, totals[at])
    added = added_bias(threads, row, own, chosen, weights, bias, g)
    total = threads.multiply_add(_by_lane(threads, totals), threads.constant(1.0), added)
    is_wanted = is_task & (threads.lane < g.columns) & (first + threads.lane < g.results)
    threads.store_number(out, row * g.results + own, total, where=is_wanted)


def _task(threads: Threads, block: Any, g: Geometry) -> tuple[Any, Any, Any]:  # noqa: ANN401 - words
    """Returns what the warp computes columns of, a choice or a row, its first column, and whether there is such."""
    parts = ceil(g.results / g.columns)
    task = block * WARPS + threads.warp
    is_task = task < g.tasks
    task = threads.least(task, g.tasks - 1)
    return task // parts, (task % parts) * g.columns, is_task


def _by_lane(threads: Threads, parts: list[Any]) -> Any:  # noqa: ANN401 - a number
    """Returns in each lane the warp's sum of one of the lanes' parts; in those without one, that of the first."""
    totals = [threads.total_of_lanes(part, LANES) for part in parts]
    found = totals[0]
    for lane, total in enumerate(totals[1:], 1):
        found = threads.select(threads.lane == lane, total, found)
    return found


def _products(
    threads: Threads,
    x: Ref,
    weight: Ref,
    factors: list[Ref],
    sets: list[tuple[Any, list[Any]]],
    g: Geometry,
) -> list[list[Any]]:
    """Returns each lane's part of the products of rows of x with rows of the weight, without scales of whole rows.

    Args:
        threads: the threads.
        x: all rows of x.
        weight: the weight's words.
        factors: its scales.
        sets: rows of x, each with the rows of the weight that it is multiplied with.
        g: the geometry.
    """
    zero = threads.lane * 0
    totals = [[zero] * len(rows) for _, rows in sets]
    pieces = g.words // WORDS
    for part in range(ceil(pieces / LANES)):
        piece = threads.lane + part * LANES
        place = threads.least(piece, pieces - 1)
        # All loads come before their use.
        codes = [
            [threads.load_words(weight, row * g.words + place * WORDS) for row in rows]
            for _, rows in sets
        ]
        for own, found, (row_of_x, rows) in zip(totals, codes, sets, strict=True):
            numbers = _numbers_of_x(threads, x, row_of_x, place, piece < pieces, g)
            for at, (row, words) in enumerate(zip(rows, found, strict=True)):
                own[at] = _piece_added(threads, own[at], words, numbers, factors, row, place, g)
    return totals


def _piece_added(
    threads: Threads,
    total: Any,  # noqa: ANN401 - a number
    words: list[Any],
    numbers: list[Any],
    factors: list[Ref],
    row: Any,  # noqa: ANN401 - a word
    place: Any,  # noqa: ANN401 - a word
    g: Geometry,
) -> Any:  # noqa: ANN401 - a number
    """Returns a total with the products of a piece of a row of the weight, scaled if there are scales of pieces."""
    is_scaled = g.scales > 1
    found = threads.lane * 0 if is_scaled else total
    per_word = len(numbers) // WORDS
    for at, word in enumerate(words):
        found = threads.dot(found, word, numbers[at * per_word : (at + 1) * per_word], g.kind)
    if not is_scaled:
        return found
    factor = row * g.scales + place * g.piece // (g.inner // g.scales)
    return threads.multiply_add(found, threads.load_number(factors[0], factor), total)


def _numbers_of_x(
    threads: Threads,
    x: Ref,
    row: Any,  # noqa: ANN401 - a word
    place: Any,  # noqa: ANN401 - a word
    is_there: Any,  # noqa: ANN401 - a condition
    g: Geometry,
) -> list[Any]:
    """Returns the numbers of x that a piece of the weight is multiplied with, or zeros if it is not there."""
    kind = jnp.dtype(g.dtype).name
    first = (row * g.inner + place * g.piece) // (WORD // BITS[kind])
    words = [
        word
        for at in range(0, g.piece * BITS[kind] // WORD, WORDS)
        for word in threads.load_words(x, first + at)
    ]
    numbers = [number for word in words for number in threads.numbers(word, kind)]
    return [threads.select(is_there, number, 0) for number in numbers]

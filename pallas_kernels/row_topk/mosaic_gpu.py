"""`row_topk` on Hopper with a Mosaic GPU kernel: a warp per row takes the largest number `count` times."""

from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.mosaic.per_thread import LANES, Threads, run_block, thread_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.mosaic.warps import WARPS

MOST_COLUMNS, MOST_COUNT = 1024, 32
"""A row's numbers are in the registers of one warp, and a lane keeps one of those that were taken."""

_MOST_NUMBERS = 2**31 - 1
"""Their places are int32."""

_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_MAGNITUDE = 0x7FFFFFFF
# Below the key of -infinity.
_TAKEN = -(2**31)
_NO_COLUMN = 2**31 - 1


def why_not(scores: ArrayOrStruct, count: int) -> str | None:
    """Returns why this kernel cannot run, or `None` if it can."""
    return why_not_mosaic() or refusal(scores, count)


def refusal(scores: ArrayOrStruct, count: int) -> str | None:
    """Returns why the kernel cannot be built for these scores, or `None` if it can."""
    if scores.shape[1] > MOST_COLUMNS:
        return f"a row must have at most {MOST_COLUMNS} numbers, got {scores.shape[1]}"
    if count > MOST_COUNT:
        return f"at most {MOST_COUNT} numbers of a row can be taken, got {count}"
    if scores.shape[0] > _MOST_NUMBERS // scores.shape[1]:
        return f"there must be at most {_MOST_NUMBERS} numbers, got {scores.shape}"
    return None


@partial(jax.jit, static_argnames=("count", "softmax", "interpret"))
def row_topk(
    scores: Float32[Array, "rows columns"],
    *,
    count: int,
    softmax: bool = False,
    interpret: bool = False,
) -> tuple[Float32[Array, "rows count"], Int32[Array, "rows count"]]:
    """Implements `api.row_topk`. With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly.

    Raises:
        ValueError: the kernel does not support the sizes.
    """
    check_kernel(refusal(scores, count))
    rows, columns = scores.shape
    code = partial(_take_largest, rows=rows, columns=columns, count=count, softmax=softmax)
    values, positions = thread_kernel(
        partial(run_block, code, takes_block=True, interpret=interpret),
        [jax.ShapeDtypeStruct((rows * count,), dtype) for dtype in (jnp.float32, jnp.int32)],
        name="row_topk",
        blocks=ceil(rows / WARPS),
        interpret=interpret,
    )(scores.reshape(-1))
    return values.reshape(rows, count), positions.reshape(rows, count)


def _take_largest(
    threads: Threads,
    scores: Ref,
    values: Ref,
    positions: Ref,
    block: Any,  # noqa: ANN401 - a word
    *,
    rows: int,
    columns: int,
    count: int,
    softmax: bool,
) -> None:
    """Writes the largest numbers of the warp's row and their columns, largest first, the first of equal ones first.

    With `softmax` it writes the softmax of these numbers.
    """
    row = block * WARPS + threads.warp
    is_row = row < rows
    begin = threads.least(row, rows - 1) * columns
    own = [threads.lane + LANES * part for part in range(ceil(columns / LANES))]
    keys = []
    for column in own:
        bits = threads.load(scores, begin + threads.least(column, columns - 1))
        keys.append(threads.select(column < columns, _ordered(threads, bits), _TAKEN))
    taken = best = threads.lane * 0
    for turn in range(count):
        largest = keys[0]
        for key in keys[1:]:
            largest = threads.most(largest, key)
        largest = threads.most_of_warp(largest)
        first = threads.lane * 0 + _NO_COLUMN
        for key, column in zip(keys, own, strict=True):
            first = threads.least(first, threads.select(key == largest, column, _NO_COLUMN))
        first = threads.least_of_warp(first)
        taken = threads.select(threads.lane == turn, first, taken)
        best = first if turn == 0 else best
        keys = [
            threads.select(column == first, _TAKEN, key)
            for key, column in zip(keys, own, strict=True)
        ]
    is_wanted = is_row & (threads.lane < count)
    place = row * count + threads.lane
    # NaN has lost its bits in the keys.
    number = threads.load(scores, begin + taken)
    if softmax:
        largest = threads.product(threads.load(scores, begin + best), threads.constant(-1.0))
        below = threads.multiply_add(number, threads.constant(1.0), largest)
        power = threads.power_of_two(threads.product(below, threads.constant(LOG2_E)))
        total = threads.total_of_lanes(threads.select(threads.lane < count, power, 0), LANES)
        number = threads.quotient(power, total)
    threads.store(values, place, number, where=is_wanted)
    threads.store(positions, place, taken, where=is_wanted)


def _ordered(threads: Threads, bits: Any) -> Any:  # noqa: ANN401 - words
    """Returns an integer that compares as the float32 does; -0.0 is below 0.0, and every NaN is the largest."""
    key = threads.select(bits < 0, bits ^ _MAGNITUDE, bits)
    return threads.select((bits & _MAGNITUDE) > _INFINITY, _NAN, key)

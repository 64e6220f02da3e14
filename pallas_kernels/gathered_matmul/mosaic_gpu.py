"""`gathered_matmul` on Hopper with a Mosaic GPU kernel: a warp computes some columns of a row and its groups."""

from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.activations import CLAMPED_RATE
from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.gathered_matmul.epilogue import SUMS, Epilogue
from pallas_kernels.mosaic.few_bits import SCALES
from pallas_kernels.mosaic.packed_numbers import BITS
from pallas_kernels.mosaic.per_thread import LANES, WORDS, Threads, run_block, thread_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.mosaic.warps import WARPS

_WORD = 32
_MOST_PLACES = 2**31 - 1
"""Places are int32."""

# Bytes of the weight that a warp reads at least if it reads several rows, and most rows that it reads at once.
_BYTES, _MOST_ROWS = 4096, 8
# Most columns of a sum over choices that a warp computes, most numbers of their pieces, and the warps that a GPU needs.
_MOST_COLUMNS, _MOST_NUMBERS, _ENOUGH_WARPS = 4, 64, 1320

_ROOT = 0.7978845608028654  # sqrt(2 / pi)


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        rows: rows of choices.
        count: choices of each row.
        groups: number of matrices of the weight.
        out: columns of the result.
        inner: size of the contraction.
        group_axis: axis of the weight that counts its matrices.
        dtype: dtype of x.
        kind: dtype of the weight, or the name of its code.
        scales: number of scales of a row of the weight; 0 without any.
        scale: their dtype; `None` without any.
        has_zeros: whether there are zero points.
        each: whether x has a row for each choice, not for each row of choices.
        summed: whether the result is a weighted sum over a row's choices.
        bias: dtype of the bias; `None` without.
        epilogue: what becomes of the sums.
    """

    rows: int
    count: int
    groups: int
    out: int
    inner: int
    group_axis: int
    dtype: DTypeLike
    kind: str
    scales: int = 0
    scale: DTypeLike | None = None
    has_zeros: bool = False
    each: bool = False
    summed: bool = False
    bias: DTypeLike | None = None
    epilogue: Epilogue = SUMS

    @classmethod
    def of(
        cls,
        weight: ArrayOrStruct | FewBits,
        x: ArrayOrStruct,
        chosen: ArrayOrStruct,
        *,
        group_axis: int,
    ) -> "Geometry":
        """Returns the geometry of these arrays."""
        (rows, count), (*_, inner) = chosen.shape, weight.shape
        groups, out = weight.shape[group_axis], weight.shape[1 - group_axis]
        is_few = isinstance(weight, FewBits)
        kind = weight.code if is_few else jnp.dtype(weight.dtype).name
        each = x.shape[0] != rows
        plain = cls(rows, count, groups, out, inner, group_axis, x.dtype, kind, each=each)
        if not is_few:
            return plain
        scales, has_zeros = weight.scales, weight.zeros is not None
        return replace(plain, scales=scales.shape[2], scale=scales.dtype, has_zeros=has_zeros)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            return f"x must be bfloat16 or float16, got {self.dtype}"
        if not self.rows * self.count * self.groups * self.out:
            return "there must be rows, choices, groups and columns"
        if not self.inner or self.inner % self.piece:
            return f"the inner size must be a multiple of {self.piece}, got {self.inner}"
        if self.scale is not None and jnp.dtype(self.scale).name not in SCALES:
            return f"scales must be {', '.join(SCALES)}, got {self.scale}"
        if self.scales > 1 and self.inner // self.scales % self.piece:
            return f"groups of columns must be multiples of {self.piece}, got {self.inner // self.scales}"
        if self.groups * self.out * self.words > _MOST_PLACES:
            return f"the weight must have at most {_MOST_PLACES} words"
        rows_of_x = self.rows * (self.count if self.each else 1)
        if max(rows_of_x * self.inner, self.rows * self.count * self.out) > _MOST_PLACES:
            return f"x and the result must have at most {_MOST_PLACES} numbers"
        return None

    @property
    def piece(self) -> int:
        """Numbers of the weight in what a lane loads at once."""
        return WORDS * _WORD // BITS[self.kind]

    @property
    def words(self) -> int:
        """Words of a row of the weight."""
        return self.inner * BITS[self.kind] // _WORD

    @property
    def results(self) -> int:
        """Columns of the result."""
        return self.epilogue.columns(self.out)

    @property
    def columns(self) -> int:
        """Columns of the result that a warp computes, of two rows of the weight each if products are gated."""
        if self.summed:
            columns = min(_MOST_COLUMNS, _MOST_NUMBERS // self.piece)
            while columns > 1 and self.rows * self.results < columns * _ENOUGH_WARPS:
                columns //= 2
            return columns
        few = max(1, min(_MOST_ROWS, self.out, _BYTES // (4 * self.words)))
        rows = max(2 if self.out > 1 else 1, 1 << few.bit_length() - 1)
        return rows // 2 if self.epilogue.gated else rows

    @property
    def tasks(self) -> int:
        """Warps that have columns to compute."""
        return self.rows * (1 if self.summed else self.count) * ceil(self.results / self.columns)

    @property
    def has_row_scales(self) -> bool:
        """Whether a row of the weight has one scale, which multiplies its whole sum."""
        return self.scales == 1 and not self.has_zeros

    def row(self, group: Any, column: Any) -> Any:  # noqa: ANN401 - words
        """Returns the row of the weight, of all groups, that a column of a group's sums is of."""
        return group * self.out + column if self.group_axis == 0 else column * self.groups + group


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
    code = _multiply_and_add if geometry.summed else _multiply
    found = thread_kernel(
        partial(run_block, partial(code, geometry=geometry), takes_block=True, interpret=interpret),
        jax.ShapeDtypeStruct((results * geometry.results,), own.result),
        name="gathered_matmul",
        blocks=ceil(geometry.tasks / WARPS),
        interpret=interpret,
    )(*(array.reshape(-1) for array in jax.tree.leaves((x, chosen, weights, bias, weight))))
    found = found.reshape(results, geometry.results)
    return found if own == epilogue else epilogue.applied(found)


def _has(epilogue: Epilogue) -> bool:
    """Returns whether the kernel computes an epilogue: it has no error function, and dtypes of 32 and 16 bits."""
    dtypes = jnp.float32, jnp.bfloat16, jnp.float16
    return epilogue.activation in (None, "silu", "gelu_tanh", "relu2") and epilogue.result in dtypes


def _multiply(
    threads: Threads,
    x: Ref,
    chosen: Ref,
    *others: Any,  # noqa: ANN401 - the bias, the weight, its scales and zero points, the result, and the block
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
    group = _group(threads, chosen, pair, g)
    halves = (0, g.results) if g.epilogue.gated else (0,)
    rows = [
        g.row(group, threads.least(first + column, g.results - 1) + half)
        for half in halves
        for column in range(g.columns)
    ]
    row_of_x = pair if g.each else pair // g.count
    [products] = _products(threads, x, weight, factors, [(row_of_x, rows)], g)
    own = threads.least(first + threads.least(threads.lane, g.columns - 1), g.results - 1)
    sums = []
    for at, half in enumerate(halves):
        found = _by_lane(threads, products[at * g.columns : (at + 1) * g.columns])
        if g.has_row_scales:
            scale = threads.load_number(factors[0], g.row(group, own + half))
            found = threads.product(found, scale)
        if bias is not None:
            added = threads.load_number(bias, group * g.out + own + half)
            found = threads.multiply_add(found, threads.constant(1.0), added)
        sums.append(found)
    is_wanted = is_task & (threads.lane < g.columns) & (first + threads.lane < g.results)
    result = _finished(threads, sums, g.epilogue)
    threads.store_number(out, pair * g.results + own, result, where=is_wanted)


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
    added = threads.lane * 0
    totals = [added] * g.columns
    at_once = _MOST_ROWS // g.columns
    for begin in range(0, g.count, at_once):
        pairs = [row * g.count + choice for choice in range(begin, min(begin + at_once, g.count))]
        groups = [_group(threads, chosen, pair, g) for pair in pairs]
        sets = [
            (pair if g.each else row, [g.row(group, column) for column in columns])
            for pair, group in zip(pairs, groups, strict=True)
        ]
        found = _products(threads, x, weight, factors, sets, g)
        for pair, group, (_, rows), products in zip(pairs, groups, sets, found, strict=True):
            share = threads.load_number(weights, pair)
            for at, (place, product) in enumerate(zip(rows, products, strict=True)):
                if g.has_row_scales:
                    product = threads.product(product, threads.load_number(factors[0], place))
                totals[at] = threads.multiply_add(product, share, totals[at])
            if bias is not None:
                of_group = threads.load_number(bias, group * g.out + own)
                added = threads.multiply_add(of_group, share, added)
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


def _group(threads: Threads, chosen: Ref, pair: Any, g: Geometry) -> Any:  # noqa: ANN401 - words
    """Returns the group of a choice."""
    return threads.most(threads.least(threads.load(chosen, pair), g.groups - 1), 0)


def _by_lane(threads: Threads, parts: list[Any]) -> Any:  # noqa: ANN401 - a number
    """Returns in each lane the warp's sum of one of the lanes' parts; in those without one, that of the first."""
    totals = [threads.total_of_warp(part) for part in parts]
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
        factors: its scales and zero points.
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
    is_scaled = g.scales > 1 or g.has_zeros
    found = threads.lane * 0 if is_scaled else total
    per_word = len(numbers) // WORDS
    for at, word in enumerate(words):
        found = threads.dot(found, word, numbers[at * per_word : (at + 1) * per_word], g.kind)
    if not is_scaled:
        return found
    factor = row * g.scales + place * g.piece // (g.inner // g.scales)
    if g.has_zeros:
        found = _without_zero(threads, found, numbers, factors[1], factor)
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
    first = (row * g.inner + place * g.piece) // (_WORD // BITS[kind])
    words = [
        word
        for at in range(0, g.piece * BITS[kind] // _WORD, WORDS)
        for word in threads.load_words(x, first + at)
    ]
    numbers = [number for word in words for number in threads.numbers(word, kind)]
    return [threads.select(is_there, number, 0) for number in numbers]


def _without_zero(
    threads: Threads,
    total: Any,  # noqa: ANN401 - a number
    numbers: list[Any],
    zeros: Ref,
    place: Any,  # noqa: ANN401 - a word
) -> Any:  # noqa: ANN401 - a number
    """Returns the products with the numbers of int4 codes less their zero point, given those with the codes - 8."""
    one = threads.constant(1.0)
    of_x = numbers[0]
    for number in numbers[1:]:
        of_x = threads.multiply_add(one, number, of_x)
    zero = threads.load_number(zeros, place)
    moved = threads.multiply_add(zero, threads.constant(-1.0), threads.constant(8.0))
    return threads.multiply_add(moved, of_x, total)


def _finished(threads: Threads, sums: list[Any], epilogue: Epilogue) -> Any:  # noqa: ANN401 - a number
    """Returns `Epilogue.applied` of the sum of a column, or of a gate and of its factor."""
    first, *others = sums
    if epilogue.clamp is not None:
        high = threads.constant(epilogue.clamp)
        first = threads.smaller(first, high)
        [up] = others
        up = threads.larger(threads.smaller(up, high), threads.constant(-epilogue.clamp))
        others = [threads.multiply_add(up, threads.constant(1.0), threads.constant(1.0))]
        first = _times_sigmoid(threads, first, first, CLAMPED_RATE)
    elif epilogue.activation == "silu":
        first = _times_sigmoid(threads, first, first, 1.0)
    elif epilogue.activation == "gelu_tanh":
        # (1 + tanh(a)) / 2 is sigmoid(2 * a).
        cube = threads.product(threads.product(first, first), first)
        inner = threads.multiply_add(cube, threads.constant(0.044715), first)
        first = _times_sigmoid(threads, first, inner, 2 * _ROOT)
    elif epilogue.activation == "relu2":
        positive = threads.larger(first, threads.constant(0.0))
        first = threads.product(positive, positive)
    return threads.product(first, others[0]) if others else first


def _times_sigmoid(
    threads: Threads,
    factor: Any,  # noqa: ANN401 - a number
    number: Any,  # noqa: ANN401 - a number
    rate: float,
) -> Any:  # noqa: ANN401 - a number
    """Returns `factor * sigmoid(rate * number)`."""
    power = threads.power_of_two(threads.product(number, threads.constant(-rate * LOG2_E)))
    one = threads.constant(1.0)
    return threads.quotient(factor, threads.multiply_add(power, one, one))

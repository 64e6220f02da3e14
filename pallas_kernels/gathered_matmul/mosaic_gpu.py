"""`gathered_matmul` on Hopper with a Mosaic GPU kernel: a warp computes some columns of a row and one of its groups."""

from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.device import why_not_mosaic
from pallas_kernels.dispatch import check_kernel
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.mosaic.few_bits import SCALES
from pallas_kernels.mosaic.packed_numbers import BITS
from pallas_kernels.mosaic.per_thread import LANES, WORDS, Threads, run_block, thread_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.warps import WARPS

_WORD = 32
_MOST_PLACES = 2**31 - 1
"""Places are int32."""

# Bytes of the weight that a warp reads at least if it computes several columns, and most columns.
_BYTES, _MOST_COLUMNS = 4096, 8
_ONE, _EIGHT, _MINUS_ONE = 0x3F800000, 0x41000000, -0x40800000


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        rows: rows of x.
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
        plain = cls(rows, count, groups, out, inner, group_axis, x.dtype, kind)
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
        if self.rows * max(self.inner, self.count * self.out) > _MOST_PLACES:
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
    def columns(self) -> int:
        """Columns of the result that a warp computes."""
        few = max(1, min(_MOST_COLUMNS, self.out, _BYTES // (4 * self.words)))
        return max(2 if self.out > 1 else 1, 1 << few.bit_length() - 1)


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


@partial(jax.jit, static_argnames=("group_axis", "interpret"))
def gathered_matmul(
    weight: Shaped[Array, "some others inner"] | FewBits,
    x: Float[Array, "rows inner"],
    chosen: Int32[Array, "rows count"],
    *,
    group_axis: int = 0,
    interpret: bool = False,
) -> Float32[Array, "pairs out"]:
    """Implements `api.gathered_matmul`. With `interpret` the kernel runs in Pallas's interpreter on the CPU, slowly.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    geometry = Geometry.of(weight, x, chosen, group_axis=group_axis)
    check_kernel(geometry.refusal())
    pairs = geometry.rows * geometry.count
    found = thread_kernel(
        partial(
            run_block,
            partial(_multiply, geometry=geometry),
            takes_block=True,
            interpret=interpret,
        ),
        jax.ShapeDtypeStruct((pairs * geometry.out,), jnp.float32),
        name="gathered_matmul",
        blocks=ceil(pairs * ceil(geometry.out / geometry.columns) / WARPS),
        interpret=interpret,
    )(*(array.reshape(-1) for array in (x, chosen, *jax.tree.leaves(weight))))
    return found.reshape(pairs, geometry.out)


def _multiply(
    threads: Threads,
    x: Ref,
    chosen: Ref,
    weight: Ref,
    *others: Any,  # noqa: ANN401 - the scales and zero points, the result, and the block
    geometry: Geometry,
) -> None:
    """Writes the columns of the warp's row and choice.

    A lane multiplies every 32nd piece of 16 bytes of a row of the weight, and the warp adds up its lanes' sums.
    """
    g = geometry
    *factors, out, block = others
    per_pair = ceil(g.out / g.columns)
    task = block * WARPS + threads.warp
    is_task = task < g.rows * g.count * per_pair
    task = threads.least(task, g.rows * g.count * per_pair - 1)
    pair, first = task // per_pair, (task % per_pair) * g.columns
    group = threads.most(threads.least(threads.load(chosen, pair), g.groups - 1), 0)
    columns = [threads.least(first + column, g.out - 1) for column in range(g.columns)]
    rows = [
        group * g.out + column if g.group_axis == 0 else column * g.groups + group
        for column in columns
    ]
    zero = threads.lane * 0
    totals = [zero] * g.columns
    pieces = g.words // WORDS
    for part in range(ceil(pieces / LANES)):
        piece = threads.lane + part * LANES
        place = threads.least(piece, pieces - 1)
        # All loads come before their use.
        codes = [threads.load_words(weight, row * g.words + place * WORDS) for row in rows]
        numbers = _numbers_of_x(threads, x, pair // g.count, place, piece < pieces, g)
        for column, (row, words) in enumerate(zip(rows, codes, strict=True)):
            scaled = g.scales > 1 or g.has_zeros
            total = zero if scaled else totals[column]
            per_word = len(numbers) // WORDS
            for at, word in enumerate(words):
                own = numbers[at * per_word : (at + 1) * per_word]
                total = threads.dot(total, word, own, g.kind)
            if scaled:
                factor = row * g.scales + place * g.piece // (g.inner // g.scales)
                if g.has_zeros:
                    total = _without_zero(threads, total, numbers, factors[1], factor)
                scale = threads.load_number(factors[0], factor)
                total = threads.multiply_add(total, scale, totals[column])
            totals[column] = total
    found = zero
    for column, (row, total) in enumerate(zip(rows, totals, strict=True)):
        total = threads.total_of_warp(total)
        if g.scales == 1 and not g.has_zeros:
            total = threads.multiply_add(total, threads.load_number(factors[0], row), zero)
        found = threads.select(threads.lane == column, total, found)
    is_wanted = is_task & (threads.lane < g.columns) & (first + threads.lane < g.out)
    threads.store(out, pair * g.out + first + threads.lane, found, where=is_wanted)


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
    one = threads.lane * 0 + _ONE
    of_x = numbers[0]
    for number in numbers[1:]:
        of_x = threads.multiply_add(one, number, of_x)
    zero = threads.load_number(zeros, place)
    moved = threads.multiply_add(zero, one * 0 + _MINUS_ONE, one * 0 + _EIGHT)
    return threads.multiply_add(moved, of_x, total)

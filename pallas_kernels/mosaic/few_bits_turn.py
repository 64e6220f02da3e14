"""One turn over a weight in 8 and 4 bits: its form, its scales, and the products of a pipeline stage.

`add_products` scales the sums of each group of columns, or of `_SPAN` columns of a longer one, in float32 and adds them
in order. `add_widened` scales the numbers instead and adds all products in one accumulator.
"""

from math import gcd
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.device import WGMMA_ROWS
from pallas_kernels.formats.few_bits import CODES, FewBits
from pallas_kernels.mosaic.few_bits import (
    NARROW_SCALES,
    SCALES,
    UNIT,
    load_scales,
    load_zeros,
    start_product,
)
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.products import wait_for
from pallas_kernels.mosaic.tiles import over_columns

# Most columns whose sums are scaled at once; their left operands fill 32 registers.
_SPAN = 128

Factors = tuple[Array, ...]
"""The scales of 64 rows, and their zero points if there are any."""


class Packing(NamedTuple):
    """The form of a weight in few bits.

    Attributes:
        code: name in `CODES`.
        group: columns per scale.
        groups: scales per row.
        scales: dtype of the scales.
        has_zeros: whether there are zero points.
    """

    code: str
    group: int
    groups: int
    scales: str
    has_zeros: bool

    @classmethod
    def of(cls, weight: FewBits) -> "Packing":
        """Returns the form of a weight."""
        scales = jnp.dtype(weight.scales.dtype).name
        groups = weight.scales.shape[-1]
        return cls(weight.code, weight.group, groups, scales, weight.zeros is not None)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODES[self.code].bits

    @property
    def names(self) -> list[str]:
        """Names of the arrays beside the codes, in the order of the leaves of `FewBits`."""
        return ["scales", "zeros"][: 1 + self.has_zeros]

    def span(self, chunk: int) -> int:
        """Returns the columns of a turn of `chunk` columns whose sums are scaled at once."""
        return gcd(chunk, _SPAN if self.groups == 1 else gcd(self.group, _SPAN))

    def scales_exactly(self, dtype: DTypeLike) -> bool:
        """Returns whether a number times its scale is one of x's dtype: four bits times a power of two, in bfloat16.

        Scales must be at most 2**125, as the product of a larger one with 6 is infinite, or at most 2**33 for kernels
        that correct the exponent in the same product (`Threads.scaled_pairs`).
        """
        is_power = self.scales == "float8_e8m0fnu"
        return is_power and self.bits == 4 and jnp.dtype(dtype) == jnp.bfloat16

    def refusal(self) -> str | None:
        """Returns why a kernel cannot multiply such a weight, or `None` if it can."""
        if self.scales not in SCALES:
            return f"scales must be one of {', '.join(SCALES)}, got {self.scales}"
        if self.groups > 1 and self.group % UNIT:
            return f"a scale must be that of a multiple of {UNIT} columns, got {self.group}"
        return None


def turn_factors(
    arrays: dict[str, Ref],
    rows: Array,
    first: Array,
    chunk: int,
    packing: Packing,
    *,
    interpret: bool,
) -> list[Factors]:
    """Loads the factors of 64 rows in a turn, one tuple per group of its columns, or one if all share it.

    Args:
        arrays: "scales" and "zeros" [rows, groups] in global memory.
        rows: int32 [64], rows of these arrays, in the layout `PER_ROW`.
        first: the first column of each row's turn, likewise; past the end the last group is loaded.
        chunk: columns of a turn.
        packing: form of the weight.
        interpret: whether the interpreter runs this.
    """
    span, found = packing.span(chunk), []
    is_one = packing.groups == 1 or packing.group % chunk == 0
    for start in range(0, span if is_one else chunk, span):
        groups = lax.div(first + start, jnp.int32(packing.group))
        groups = jnp.minimum(groups, packing.groups - 1)
        scales = load_scales(arrays["scales"], rows, groups, interpret=interpret)
        factors = (scales,)
        if packing.has_zeros:
            zeros = load_zeros(arrays["zeros"], rows, groups, interpret=interpret)
            factors = scales, zeros
        found.append(factors)
    return found


def add_products(
    sums: list[Array],
    codes: Ref,
    x: Ref,
    factors: list[list[Factors]],
    packing: Packing,
    *,
    ahead: int,
    interpret: bool,
) -> list[Array]:
    """Returns the sums and the scaled products of one turn; all products have read the stage when it returns.

    Args:
        sums: float32 [64, rows], one array per 64 rows of the weight.
        codes: [64 * len(sums), bytes] in shared memory.
        x: [rows, chunk] in shared memory.
        factors: of each 64 rows of the weight, as `turn_factors` returns them.
        packing: form of the weight.
        ahead: products in flight while the next one's codes are widened, 0 or 1; each takes registers.
        interpret: whether the interpreter runs this.
    """
    sums, (width, chunk) = list(sums), x.shape
    span = packing.span(chunk)
    places = [(index, place) for place in range(chunk // span) for index in range(len(sums))]

    def factors_of(index: int, place: int) -> Factors:
        return factors[index][place % len(factors[index])]

    def begin(index: int, place: int) -> Array:
        _, *zeros = factors_of(index, place)
        return start_product(
            codes.at[pl.ds(WGMMA_ROWS * index, WGMMA_ROWS)],
            x,
            zeros[0] if zeros else None,
            code=packing.code,
            first=place * span,
            columns=span,
            interpret=interpret,
        )

    started = [begin(*place) for place in places[:ahead]]
    for number, (index, place) in enumerate(places):
        started += [begin(*after) for after in places[number + ahead : number + ahead + 1]]
        pending = len(started) - 1
        (found,) = wait_for(started.pop(0), interpret=interpret, pending=pending)
        sums[index] += found * over_columns(factors_of(index, place)[0], width)
    return sums


def add_widened(
    sums: Array,
    codes: Ref,
    x: Ref,
    factors: list[Factors],
    packing: Packing,
    *,
    scaled: bool,
    interpret: bool,
) -> Array:
    """Returns the sums and the products of one turn, added in order; all have read the stage when it returns.

    Args:
        sums: float32 [64, rows].
        codes: [64, bytes] in shared memory.
        x: [rows, chunk] in shared memory.
        factors: as `turn_factors` returns them.
        packing: form of the weight.
        scaled: whether the scales multiply the numbers, which are rounded to x's dtype; otherwise they are left out.
        interpret: whether the interpreter runs this.
    """
    chunk = x.shape[1]
    span = packing.span(chunk)
    for place in range(chunk // span):
        scales, *zeros = factors[place % len(factors)]
        sums = start_product(
            codes,
            x,
            zeros[0] if zeros else None,
            code=packing.code,
            first=place * span,
            columns=span,
            interpret=interpret,
            scales=scales if scaled else None,
            are_narrow=packing.scales in NARROW_SCALES,
            onto=sums,
        )
    return wait_for(sums, interpret=interpret)[0]

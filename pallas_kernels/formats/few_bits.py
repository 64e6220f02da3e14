"""`FewBits`: a weight in 8 or 4 bits as the products read it. Checkpoints of every format become this one layout."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped


class Code(NamedTuple):
    """An encoding of numbers in 8 or 4 bits, before their scales.

    Attributes:
        bits: bits of a code, 8 or 4.
        stored: dtype of `FewBits.codes`.
        is_float: whether codes are floating-point numbers, which have no zero points.
    """

    bits: int
    stored: DTypeLike
    is_float: bool


CODES = {
    "float8_e4m3fn": Code(8, jnp.float8_e4m3fn, is_float=True),
    "int8": Code(8, jnp.int8, is_float=False),
    "int4": Code(4, jnp.uint8, is_float=False),
    "float4_e2m1fn": Code(4, jnp.uint8, is_float=True),
}
"""Name -> code. An int4 code is 0 to 15 and stands for code - 8, or for code - zero where there are zero points."""


# JAX rebuilds trees from shapes and other objects, which the tests' shape checker would refuse.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FewBits:
    """A weight [*lead, out, inner] in few bits: `weight = number(code) * scale`, one scale per group of columns.

    Attributes:
        codes: [*lead, out, inner] of 8 bits, or uint8 [*lead, out, inner / 2] with two 4-bit codes per byte, that of
            the even column in the lower nibble.
        scales: [*lead, out, groups], float32, bfloat16, float16 or float8_e8m0fnu. Groups are equally many adjacent
            columns; one group is a scale per row. A scale of a block of rows is repeated for each row, so that rows of
            several weights can be concatenated.
        zeros: uint8 [*lead, out, groups], the zero points of int4 codes, 0 to 127; `None` for 8, that of symmetric
            formats.
        order: int32 [inner] or [*lead, inner]: column of x that each column of the codes multiplies, for formats that
            sort columns by importance (GPTQ's act-order); `None` for the same one.
        code: name in `CODES`.
        rounds_rows: whether `skinny_matmul` of more than 64 rows of 16 bits, of a multiple of 128 columns, rounds each
            row of x to float8_e4m3fn, with a float32 scale of its own, as checkpoints of FP8 with dynamic activations
            are meant. The weight is e4m3 with one scale per row.
    """

    codes: Shaped[Array, "*lead out stored"]
    scales: Shaped[Array, "*lead out groups"]
    zeros: Shaped[Array, "*lead out groups"] | None
    order: Shaped[Array, "*any inner"] | None
    code: str = field(metadata={"static": True})
    rounds_rows: bool = field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that it stands for."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // CODES[self.code].bits)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    def rows(self, start: Int[Array, ""] | int, count: int) -> "FewBits":
        """Returns `count` adjacent rows of a weight [out, inner], from `start` on."""

        def cut(array: Shaped[Array, "out ..."]) -> Shaped[Array, "count ..."]:
            return jax.lax.dynamic_slice_in_dim(array, start, count)

        zeros = None if self.zeros is None else cut(self.zeros)
        return replace(self, codes=cut(self.codes), scales=cut(self.scales), zeros=zeros)

    def numbers(self) -> Float[Array, "*lead out inner"]:
        """Returns float32 numbers, zero points subtracted and not scaled; all are exact in bfloat16 and float16."""
        code = CODES[self.code]
        if code.bits == 8:
            return self.codes.astype(jnp.float32)
        pairs = jnp.stack((self.codes & 15, self.codes >> 4), axis=-1).reshape(self.shape)
        if code.is_float:
            return _of_e2m1(pairs.astype(jnp.int32))
        zeros = jnp.float32(8)
        if self.zeros is not None:
            zeros = jnp.repeat(self.zeros.astype(jnp.float32), self.group, axis=-1)
        return pairs.astype(jnp.float32) - zeros

    def widened(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "*lead out inner"]:
        """Returns the weight, computed in float32 and rounded once; its columns are those of the codes, see `order`."""
        scales = jnp.repeat(self.scales.astype(jnp.float32), self.group, axis=-1)
        return (self.numbers() * scales).astype(dtype)


def _of_e2m1(codes: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the numbers of e2m1 codes (OCP Microscaling Formats 1.0): sign, two bits of exponent, one of mantissa.

    Without a table, because a kernel that is interpreted cannot capture one.
    """
    exponent, mantissa = codes >> 1 & 3, codes & 1
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa << exponent) >> 1)
    numbers = halves.astype(jnp.float32) * 0.5
    return jnp.where(codes >> 3 == 1, -numbers, numbers)

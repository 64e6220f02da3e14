"""What is left of the state after each token of a piece: the sums that the `ssd_scan` kernel has no time for.

One small Mosaic GPU kernel: a thread goes through the tokens of a piece for one head, so that sums are made in the
order of tokens, whatever else is in the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from pallas_kernels.attention_scores import LOG2_E
from pallas_kernels.mosaic_rows import INTERPRETED, LOAD_BYTES, flat_pieces
from pallas_kernels.mosaic_steps import Limits, step_of
from pallas_kernels.packed_rows import Pieces

Ref = Any

_THREADS = 128
# Tokens whose steps are loaded at a time.
_BATCH = 32


def decays(
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    dt: Float[Array, "tokens heads"],
    pieces: Pieces,
    *,
    size: int,
    dt_limits: Limits,
    interpret: bool,
) -> Float[Array, "pieces heads 2 size"]:
    """Returns base-2 logarithms, two rows per piece and head.

    The first row has what is left, after each token, of the state before the piece; the second one the same less the
    token's step, infinite where that is 0 or there is no token.
    """
    heads = dt.shape[1]
    body = _Decays(heads, size, dt_limits)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(pieces.start), heads, 2, size), jnp.float32),
        grid=(len(pieces.start) * len(body.spans),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=INTERPRETED if interpret else None,
        kernel_name="ssd_decays",
    )(a_log, dt_bias, dt, pieces.start, pieces.length)


@dataclass(frozen=True)
class _Decays:
    """The kernel for a number of heads."""

    heads: int
    size: int
    dt_limits: Limits

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First head and heads of each block: one for each thread, then powers of two."""
        widths = [_THREADS] * (self.heads // _THREADS)
        rest = self.heads % _THREADS
        widths += [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
        return tuple((sum(widths[:index]), width) for index, width in enumerate(widths))

    def __call__(self, *refs: Ref) -> None:
        named = dict(zip(["a_log", "dt_bias", "dt", "start", "length", "out"], refs, strict=True))
        block, count = lax.axis_index("block"), jnp.int32(len(self.spans))
        piece, place = lax.div(block, count), lax.rem(block, count)
        used = named["length"][piece] > 0
        for index, (start, width) in enumerate(self.spans):
            pl.when(used & (place == index))(partial(self.run, named, piece, start, width))

    def run(self, refs: Mapping[str, Ref], piece: Array, first: int, width: int) -> None:
        """Sums for some heads of one piece."""
        (cut,) = flat_pieces(width, LOAD_BYTES)
        # A vector of one would be taken for a scalar whose layout nobody knows.
        heads = pl.ds(first, width) if width > 1 else first
        start, length = refs["start"][piece], refs["length"][piece]

        def load(ref: Ref) -> Array:
            if width == 1:
                return ref[heads].astype(jnp.float32)
            loaded = plgpu.load(ref.at[heads], layout=cut.layout, optimized=False)
            return loaded.astype(jnp.float32)

        bias = load(refs["dt_bias"])
        rate = -LOG2_E * jnp.exp(load(refs["a_log"]))

        def visit(number: Array, passed: Array) -> Array:
            places = [number * _BATCH + index for index in range(_BATCH)]
            sent = [load(refs["dt"].at[start + jnp.minimum(at, length - 1)]) for at in places]
            for at, dt in zip(places, sent, strict=True):
                real = at < length
                step = step_of(dt, bias, self.dt_limits)
                passed = jnp.where(real, passed + rate * step, passed)
                less = jnp.where(real & (step > 0.0), passed - jnp.log(step) * LOG2_E, jnp.inf)
                refs["out"][piece, heads, 0, at] = passed
                refs["out"][piece, heads, 1, at] = less
            return passed

        nothing = jnp.zeros_like(rate)
        nothing = plgpu.layout_cast(nothing, cut.layout) if width > 1 else nothing
        lax.fori_loop(jnp.int32(0), self.size // _BATCH, visit, nothing)

"""What is left of the state after each token of a piece: the sums that the `ssd_scan` kernel has no time for.

One small Mosaic GPU kernel. A block has a piece, each of its warpgroups a share of the tokens, and each thread a head:
it sums its share in the order of tokens, and adds what the shares before came to, in their order, whatever else is in
the batch. Threads have their results side by side in memory for a whole share, and so write them 16 bytes at a time.
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

from pallas_kernels.mosaic.activations import Limits, step_of
from pallas_kernels.mosaic.launch import LANE_PARAMS, interpreter
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import LOAD_BYTES, flat_pieces
from pallas_kernels.mosaic.scores import LOG2_E
from pallas_kernels.mosaic.stores import store_side_by_side
from pallas_kernels.mosaic.warps import meet_all
from pallas_kernels.packed.rows import Pieces

_THREADS = 128
# Warpgroups that share the tokens of a piece.
_SHARES = 4


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
    token's step, infinite where that is 0 or there is no token. `size` is a multiple of 16.
    """
    heads = dt.shape[1]
    body = _Decays(heads, size, dt_limits, interpret)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(pieces.start), heads, 2, size), jnp.float32),
        grid=(len(pieces.start) * len(body.spans),),
        grid_names=("block",),
        num_threads=_SHARES,
        thread_name="share",
        scratch_types=(
            plgpu.SMEM((_SHARES, _THREADS), jnp.float32),
            plgpu.Barrier(num_arrivals=_SHARES),
        ),
        compiler_params=LANE_PARAMS,
        interpret=interpreter(interpret),
        kernel_name="ssd_decays",
    )(a_log, dt_bias, dt, pieces.start, pieces.length)


@dataclass(frozen=True)
class _Decays:
    """The kernel for a number of heads."""

    heads: int
    size: int
    dt_limits: Limits
    interpret: bool

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First head and heads of each block: one for each thread, then powers of two."""
        widths = [_THREADS] * (self.heads // _THREADS)
        rest = self.heads % _THREADS
        widths += [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
        return tuple((sum(widths[:index]), width) for index, width in enumerate(widths))

    def __call__(self, *refs: Ref) -> None:
        names = ["a_log", "dt_bias", "dt", "start", "length", "out", "totals", "met"]
        named = dict(zip(names, refs, strict=True))
        block, count = lax.axis_index("block"), jnp.int32(len(self.spans))
        piece, place = lax.div(block, count), lax.rem(block, count)
        used = named["length"][piece] > 0
        for index, (start, width) in enumerate(self.spans):
            pl.when(used & (place == index))(partial(self.run, named, piece, start, width))

    def run(self, refs: Mapping[str, Ref], piece: Array, first: int, width: int) -> None:
        """Sums for some heads of one piece, each warpgroup its share of the tokens."""
        (cut,) = flat_pieces(width, LOAD_BYTES)
        # A vector of one would be taken for a scalar whose layout nobody knows.
        heads, own = (pl.ds(first, width), pl.ds(0, width)) if width > 1 else (first, 0)
        start, length = refs["start"][piece], refs["length"][piece]
        share, tokens = lax.axis_index("share"), self.size // _SHARES

        def load(ref: Ref, place: Any = heads) -> Array:  # noqa: ANN401 - a slice of a private type
            if width == 1:
                return ref[place].astype(jnp.float32)
            loaded = plgpu.load(ref.at[place], layout=cut.layout, optimized=False)
            return loaded.astype(jnp.float32)

        places = [share * tokens + index for index in range(tokens)]
        sent = [load(refs["dt"].at[start + jnp.minimum(at, length - 1)]) for at in places]
        bias = load(refs["dt_bias"])
        rate = -LOG2_E * jnp.exp(load(refs["a_log"]))
        nothing = jnp.zeros_like(rate)
        total = nothing = plgpu.layout_cast(nothing, cut.layout) if width > 1 else nothing
        sums, logs = [], []
        for at, dt in zip(places, sent, strict=True):
            step = step_of(dt, bias, self.dt_limits)
            total = jnp.where(at < length, total + rate * step, total)
            sums.append(total)
            logs.append(jnp.where((at < length) & (step > 0.0), jnp.log(step) * LOG2_E, -jnp.inf))
        refs["totals"][share, own] = total
        meet_all(refs["met"], interpret=self.interpret)
        before = nothing
        for other in range(_SHARES - 1):
            known = load(refs["totals"].at[other], own)
            before = jnp.where(other < share, before + known, before)
        passed = [before + part for part in sums]
        # What is lost without end must not make a number of what has no step.
        less = [
            jnp.where(log > -jnp.inf, left - log, jnp.inf)
            for left, log in zip(passed, logs, strict=True)
        ]
        for row, numbers in enumerate((passed, less)):
            for index in range(0, tokens if width == 1 else 0):
                refs["out"][piece, heads, row, share * tokens + index] = numbers[index]
            if width > 1:
                store_side_by_side(
                    refs["out"],
                    (piece, first, row, share * tokens),
                    numbers,
                    layout=cut.layout,
                    interpret=self.interpret,
                )

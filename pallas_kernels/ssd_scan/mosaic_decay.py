"""A small Mosaic GPU kernel that computes the prefix sums of log decays within each piece, for the `ssd_scan` kernel.

A block processes a piece, each of its warpgroups a share of the tokens, and each thread one head. A thread sums its
share in the order of tokens, then adds the totals of the preceding shares in order; so the bits do not depend on the
rest of the batch. Results go through shared memory, so that whole lines are written: a thread's lie 512 bytes from
those of the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from pallas_kernels.mosaic.activations import Limits, step_of
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.launch import LANE_PARAMS, mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import LOAD_BYTES, flat_pieces
from pallas_kernels.mosaic.softmax import LOG2_E
from pallas_kernels.mosaic.tiles import untiled_swizzle
from pallas_kernels.mosaic.warps import sync_block
from pallas_kernels.packed.rows import Pieces
from pallas_kernels.ssd_scan.mosaic_side_by_side import store_side_by_side

_THREADS = 128
# Warpgroups among which the tokens of a piece are divided.
_SHARES = 4
# Numbers of 128 bytes.
_LINE = 32


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

    The first row is the log decay of the piece's initial state up to and including each token. The second row is the
    first minus the logarithm of the token's step (`passed` and `less` in mosaic_weights.py); it is +inf if the step is
    0, if there is no token, or if the first is NaN, so that a NaN reaches no earlier token. `size` is 32 or 64.
    """
    assert size in (_LINE, 2 * _LINE), size
    heads, lines = dt.shape[1], 2 * size // _LINE
    body = _Decays(heads, size, dt_limits, interpret)
    found = mosaic_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(pieces.start), heads, lines, _LINE), jnp.float32),
        grid=(len(pieces.start) * len(body.spans),),
        grid_names=("block",),
        num_threads=_SHARES,
        thread_name="share",
        scratch_types=(
            plgpu.SMEM((_SHARES, _THREADS), jnp.float32),
            plgpu.SMEM((lines, _THREADS, _LINE), jnp.float32, transforms=untiled_swizzle(128)),
            plgpu.Barrier(num_arrivals=_SHARES),
        ),
        compiler_params=replace(LANE_PARAMS, approx_math=True),
        interpret=interpret,
        kernel_name="ssd_decays",
    )(a_log, dt_bias, dt, pieces.start, pieces.length)
    return found.reshape(-1, heads, 2, size)


@dataclass(frozen=True)
class _Decays:
    """The kernel for a number of heads."""

    heads: int
    size: int
    dt_limits: Limits
    interpret: bool

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First head and number of heads of each block: 128, then powers of two for the rest."""
        widths = [_THREADS] * (self.heads // _THREADS)
        rest = self.heads % _THREADS
        widths += [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
        return tuple((sum(widths[:index]), width) for index, width in enumerate(widths))

    def __call__(self, *refs: Ref) -> None:
        arrays = ["a_log", "dt_bias", "dt", "start", "length", "out"]
        scratch = ["totals", "lines", "all_arrived"]
        named = dict(zip([*arrays, *scratch], refs, strict=True))
        block, count = lax.axis_index("block"), jnp.int32(len(self.spans))
        piece, place = lax.div(block, count), lax.rem(block, count)
        used = named["length"][piece] > 0
        for index, (start, width) in enumerate(self.spans):
            pl.when(used & (place == index))(partial(self.run, named, piece, start, width))

    def run(self, refs: Mapping[str, Ref], piece: Array, first: int, width: int) -> None:
        """Computes the sums of some heads of one piece; each warpgroup processes its share of the tokens."""
        (cut,) = flat_pieces(width, LOAD_BYTES)
        # A single head is indexed as a scalar, since Mosaic infers no layout for vectors of one element.
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
        assign(refs["totals"], (share, own), total)
        sync_block(refs["all_arrived"], interpret=self.interpret)
        before = nothing
        for other in range(_SHARES - 1):
            known = load(refs["totals"].at[other], own)
            before = jnp.where(other < share, before + known, before)
        passed = [before + part for part in sums]
        # `less` is +inf for tokens without a step, even if `passed` is -inf.
        less = [
            jnp.where((log > -jnp.inf) & (left == left), left - log, jnp.inf)
            for left, log in zip(passed, logs, strict=True)
        ]
        for row, numbers in enumerate((passed, less)):
            place = row * self.size + share * tokens
            line, column = lax.div(place, jnp.int32(_LINE)), lax.rem(place, jnp.int32(_LINE))
            if width == 1:
                for index, number in enumerate(numbers):
                    assign(refs["out"], (piece, first, line, column + index), number)
            else:
                store_side_by_side(
                    refs["lines"].at[line],
                    column,
                    numbers,
                    layout=cut.layout,
                    interpret=self.interpret,
                )
        if width > 1:
            self.send(refs, piece, first, width)

    def send(self, refs: Mapping[str, Ref], piece: Array, first: int, width: int) -> None:
        """Copies the results of all warpgroups from shared memory, one line of each head per warpgroup."""
        plgpu.commit_smem()
        sync_block(refs["all_arrived"], interpret=self.interpret)
        share, lines = lax.axis_index("share"), refs["lines"].shape[0]

        @pl.when(share < lines)
        def _() -> None:
            source = refs["lines"].at[share, pl.ds(0, width)]
            target = refs["out"].at[piece, pl.ds(first, width), share]
            plgpu.copy_smem_to_gmem(source, target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

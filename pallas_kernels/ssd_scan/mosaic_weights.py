"""Weights and factors of a piece's tokens, which the producer of the `ssd_scan` kernel hands to the consumers.

Names: `passed` is the base-2 logarithm of the decay of the piece's initial state up to and including each token. `less`
is `passed` minus the base-2 logarithm of the token's step, so that `exp2(passed[i] - less[j])` is the factor of token
j's input in the state after token i. The weight of token j in the output of token i is that factor times C[i].B[j].

Both are kept in shared memory, once for each consumer. Its barrier `weighed` says that they are there, and
`weights_free` that all of its warps have read them.
"""

from collections.abc import Sequence

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.device import ROW_TILE
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.rows import broadcast, load
from pallas_kernels.mosaic.tiles import PER_ROW, WGMMA, column_groups
from pallas_kernels.ssd_scan.mosaic_multiplier import LESS, PASSED, Multiplier
from pallas_kernels.ssd_scan.mosaic_schedule import SIDE
from pallas_kernels.ssd_scan.mosaic_two_parts import two_parts

# The largest logarithm of a factor; infinity times a product of 0 would be NaN.
_MOST = 126.0


class Weights(Multiplier):
    """Base class of the producer: the weights and factors of all consumers."""

    def weigh(self, slot: Array, products: Ref) -> None:
        """Hands each consumer its weights and factors of a piece, of which `products` holds C times B."""
        preceding = self.preceding(self.result(products, None))
        for consumer in range(self.kernel.schedule.consumers):
            decay = self.refs["decay"].at[slot, consumer]
            columns, factors = self.columns(preceding, decay), self.factors(decay)
            plgpu.barrier_wait(self.refs["weights_free"].at[consumer])
            assign(self.refs["factors"].at[consumer], ..., factors)
            self.put(self.refs["weights"].at[consumer], columns)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.refs["weighed"].at[consumer])

    def factors(self, decay: Ref) -> Array:
        """Returns the decay factors of outputs (exp2(passed)) and of inputs (exp2(end - less)), one per thread."""
        if self.kernel.interpret:
            held = decay[...]
            token = jnp.arange(2 * SIDE, dtype=jnp.int32)
        else:
            layout = plgpu.Layout.WG_STRIDED((2 * SIDE,), vec_size=1)
            held = plgpu.load(decay, layout=layout, optimized=False)
            token = plgpu.broadcasted_iota(jnp.int32, (2 * SIDE,), 0, layout=layout)
        exponents = jnp.where(token < SIDE, held, decay[SIDE - 1] - held)
        return jnp.exp2(exponents)

    def preceding(self, products: Array) -> list[Array]:
        """Returns the products of tokens with themselves and preceding ones, else zeros, 8 columns at a time.

        Indices of only 8 columns are constants, not registers.
        """
        shape = (SIDE, ROW_TILE)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
        distance = row - plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        return [
            jnp.where(distance >= ROW_TILE * number, column, 0.0)
            for number, column in enumerate(column_groups(products))
        ]

    def columns(self, products: Sequence[Array], decay: Ref) -> list[Array]:
        """Returns the tokens' weights for one consumer, 8 columns at a time."""
        ends = column_groups(self.per_column(decay.at[LESS]))
        passed = broadcast(load(decay.at[PASSED], PER_ROW), products[0].shape, 0, WGMMA)
        return [
            # A larger factor belongs to a later token, whose product is 0.
            product * jnp.exp2(jnp.minimum(passed - end, _MOST))
            for product, end in zip(products, ends, strict=True)
        ]

    def put(self, weights: Ref, columns: Sequence[Array]) -> None:
        """Stores weights in shared memory: rounded, and if exact their rounding errors."""
        dtype, interpret = self.geometry.dtype, self.kernel.interpret
        pairs = [two_parts(each, dtype, layout=WGMMA, interpret=interpret) for each in columns]
        for part, found in zip(range(weights.shape[0]), zip(*pairs, strict=True), strict=False):
            assign(weights.at[part], ..., lax.concatenate(found, 1))

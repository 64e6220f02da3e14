"""Products of a consumer warpgroup in an accumulator: asynchronous wgmma, or plain products in the interpreter.

The interpreter supports neither wgmma nor accumulators in registers; there an accumulator is a ref in shared memory.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.mosaic.private_types import Ref


def add_product(
    acc: Ref,
    left: Any,  # noqa: ANN401 - a ref or an array
    right: Ref,
    *,
    transposed: bool = False,
    interpret: bool,
) -> None:
    """Issues the wgmma that adds the product of `left` and `right` to an accumulator."""
    if not interpret:
        plgpu.wgmma(acc, left, right.transpose((1, 0)) if transposed else right)
        return
    left, right = left[...].astype(jnp.float32), right[...].astype(jnp.float32)
    acc[...] += lax.dot(left, right.T if transposed else right)
    plgpu.commit_smem()


def wait_for_products(acc: Ref, in_flight: int | None, *, interpret: bool) -> Array:
    """Returns an accumulator's value after waiting until at most `in_flight` later products are pending.

    With `None` it does not wait: the caller knows that no product for the accumulator is pending.
    """
    if interpret:
        return acc[...]
    return plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)

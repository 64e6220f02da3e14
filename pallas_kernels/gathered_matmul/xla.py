"""`gathered_matmul` in plain XLA, for any sizes and floating dtypes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.gathered_matmul.epilogue import Epilogue


def gathered_matmul(
    weight: Shaped[Array, "some others inner"] | FewBits,
    x: Float[Array, "rows_of_x inner"],
    chosen: Int32[Array, "rows count"],
    bias: Float[Array, "groups out"] | None,
    weights: Float32[Array, "rows count"] | None,
    *,
    group_axis: int,
    epilogue: Epilogue,
) -> Float[Array, "results columns"]:
    """Implements `api.gathered_matmul`; a weight in few bits is rounded to x's dtype.

    XLA joins gather, widening and product into one kernel. Its order of sums may depend on the number of pairs, also
    under `fixed_order`, where models do not call it. float32 inputs are multiplied at the highest precision: on
    NVIDIA GPUs the default would round them to TF32.
    """
    ids = chosen.reshape(-1)
    # The parts of a weight in few bits are gathered like a plain one.
    picked = jax.tree.map(lambda part: jnp.take(part, ids, axis=group_axis, mode="clip"), weight)
    matrices = picked.widened(x.dtype) if isinstance(picked, FewBits) else picked
    sums = jax.lax.dot_general(
        matrices,
        x if len(x) == len(ids) else jnp.repeat(x, chosen.shape[1], axis=0),
        (((2,), (1,)), ((group_axis,), (0,))),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    sums = sums if bias is None else sums + bias[ids].astype(jnp.float32)
    if weights is None:
        return epilogue.applied(sums)
    # As additions, which XLA joins; a reduction would be a kernel of its own.
    each = sums.reshape(*chosen.shape, -1)
    first, *others = (each[:, at] * weights[:, at, None] for at in range(chosen.shape[1]))
    return epilogue.applied(sum(others, first))

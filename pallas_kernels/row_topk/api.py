"""Public entry point of `row_topk`: the largest numbers of each row, or their softmax, and their columns."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Shaped

from pallas_kernels.arguments.checks import check_shape
from pallas_kernels.dispatch import choose
from pallas_kernels.row_topk import mosaic_gpu, xla


def row_topk(
    scores: Shaped[Array | np.ndarray, "rows columns"],
    count: int,
    *,
    softmax: bool = False,
    implementation: str | None = None,
) -> tuple[Float32[Array, "rows count"], Int32[Array, "rows count"]]:
    """Returns the largest numbers of each row, largest first, and their columns, as `jax.lax.top_k` does.

    Of equal numbers the one with the lower column comes first, and -0.0 is below 0.0. The columns of a row differ
    for all numbers; where NaN comes is not defined.

    Args:
        scores: float32, such as a router's scores of experts.
        count: numbers to take of each row, at most its columns.
        softmax: return the softmax of the numbers taken in their place.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Raises:
        ValueError: shape, dtype or count do not fit.
        Unsupported: the requested implementation cannot run; the message gives the reason.
    """
    check_shape("scores", scores, (None, None))
    if scores.dtype != jnp.float32:
        raise ValueError(
            f"scores must be float32, got {scores.dtype}; cast them where they are built"
        )
    if not 0 < count <= scores.shape[1]:
        raise ValueError(f"count must be between 1 and the {scores.shape[1]} columns, got {count}")
    numbers = jnp.asarray(scores)
    reasons = {
        "mosaic_gpu": lambda: mosaic_gpu.why_not(numbers, count),
        "xla": lambda: None,
    }
    if mosaic_gpu.refusal(numbers, count) is not None:
        # For these sizes XLA is preferred, so its choice must not count as a fallback.
        reasons = dict(reversed(reasons.items()))
    chosen = choose("row_topk", reasons, implementation)
    function = mosaic_gpu.row_topk if chosen == "mosaic_gpu" and scores.shape[0] else xla.row_topk
    return function(numbers, count=count, softmax=softmax)

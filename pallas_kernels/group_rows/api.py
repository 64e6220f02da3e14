"""Public entry point of `group_rows`: a row of x for each group that the row chooses, sorted by group."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.arguments.checks import check_ids, check_shape
from pallas_kernels.dispatch import choose
from pallas_kernels.group_rows import mosaic_gpu, xla


def group_rows(
    x: Shaped[Array | np.ndarray, "tokens width"],
    chosen: Shaped[Array | np.ndarray, "tokens count"],
    groups: int,
    *,
    implementation: str | None = None,
) -> tuple[
    Shaped[Array, "rows width"],
    Int32[Array, " rows"],
    Int32[Array, "tokens count"],
    Int32[Array, " groups"],
]:
    """Returns the rows that `grouped_matmul` multiplies: one for each token and group that it chooses, by group.

    Rows of a group are in the order of their tokens.

    Args:
        x: a row per token, of any dtype.
        chosen: int32 groups of each token, which differ from one another; checked for concrete arrays alone. Under a
            trace a token that chooses a group twice may leave rows undefined.
        groups: number of groups.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The rows; the group of each; the row of each token and choice; the number of rows of each group.

    Raises:
        ValueError: shapes or dtypes do not fit, or a token chooses a group that is not there, or one twice.
        Unsupported: the requested implementation cannot run; the message gives the reason.
    """
    check_shape("x", x, (None, None))
    check_ids("chosen", chosen, (x.shape[0], None))
    _check_groups(chosen, groups)
    rows, ids = jax.tree.map(jnp.asarray, (x, chosen))
    reasons = {
        "mosaic_gpu": lambda: mosaic_gpu.why_not(rows, ids, groups),
        "xla": lambda: None,
    }
    if mosaic_gpu.refusal(rows, ids, groups) is not None:
        # For these sizes XLA is preferred, so its choice must not count as a fallback.
        reasons = dict(reversed(reasons.items()))
    chosen_one = choose("group_rows", reasons, implementation)
    is_ours = chosen_one == "mosaic_gpu" and chosen.size > 0
    return (mosaic_gpu if is_ours else xla).group_rows(rows, ids, groups=groups)


def _check_groups(chosen: Array | np.ndarray, groups: int) -> None:
    """Raises `ValueError` if a token chooses too many groups, one that is not there, or one twice."""
    if chosen.shape[1] > groups:
        raise ValueError(f"a token cannot choose {chosen.shape[1]} of {groups} groups")
    if isinstance(chosen, Tracer) or not chosen.size:
        return
    ids = np.sort(np.asarray(chosen), axis=1)
    if ids.max() >= groups:
        raise ValueError(f"there are {groups} groups, but a token chooses group {ids.max()}")
    if (ids[:, 1:] == ids[:, :-1]).any():
        raise ValueError("a token chooses a group twice; its choices must differ from one another")

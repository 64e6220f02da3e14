"""Public entry point of `page_write`: writes new tokens' values into pages, in place if the pages are donated."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from pallas_kernels.arguments.checks import INT32_MAX, check_ids, check_shape
from pallas_kernels.dispatch import choose
from pallas_kernels.page_write import mosaic_gpu, xla
from pallas_kernels.page_write.mosaic_gpu import direct_launch

__all__ = ["direct_launch", "page_write"]


def page_write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    values: tuple[Shaped[Array | np.ndarray, "tokens ..."], ...],
    slots: Shaped[Array | np.ndarray, " tokens"],
    *,
    implementation: str | None = None,
) -> tuple[Shaped[Array, "pages page_size ..."], ...]:
    """Returns the pages with one value per token written at the token's slot, cast to the pages' dtype.

    Args:
        pages: pools that share page ids, such as keys and values; each may have its own shape per token and its own
            dtype. Donate them for a write in place.
        values: for each pool, one value per token.
        slots: int32 `page * page_size + offset` of each token, all distinct. Slots >= `num_slots` (pages * page_size)
            write nothing; give padding token r the slot `num_slots + r`.
        implementation: "mosaic_gpu", "xla", or `None` for the first that can run.

    Returns:
        The updated pools, in the order of `pages`.

    Raises:
        ValueError: shapes do not fit, slots are not int32, or a concrete slot is negative.
        Unsupported: the requested implementation, or every implementation, cannot run; the message lists the reasons.
    """
    if not pages or len(pages) != len(values):
        raise ValueError(
            f"values must have one array per pool, got {len(pages)} pools and {len(values)} arrays of values"
        )
    num_pages, page_size = pages[0].shape[:2]
    for index, (pool, value) in enumerate(zip(pages, values, strict=True)):
        check_shape(f"pages[{index}]", pool, (num_pages, page_size, *pool.shape[2:]))
        check_shape(f"values[{index}]", value, (slots.shape[0], *pool.shape[2:]))
    check_ids("slots", slots, (None,))
    if num_pages * page_size + slots.shape[0] > INT32_MAX:
        raise ValueError(
            f"{num_pages} pages of {page_size} leave no int32 numbers for padding slots; "
            "use fewer or larger pools"
        )
    arrays = pages, tuple(jnp.asarray(value) for value in values), jnp.asarray(slots)
    reasons = {"mosaic_gpu": lambda: mosaic_gpu.why_not(*arrays), "xla": lambda: None}
    chosen = choose("page_write", reasons, implementation)
    return mosaic_gpu.page_write(*arrays) if chosen == "mosaic_gpu" else xla.page_write(*arrays)

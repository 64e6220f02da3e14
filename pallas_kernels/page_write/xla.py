"""`page_write` as one XLA scatter per pool, copy-free under donation. Knows nothing about what a page holds."""

import jax
from jaxtyping import Array, Int, Shaped


def page_write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    values: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int[Array, " tokens"],
) -> tuple[Shaped[Array, "pages page_size ..."], ...]:
    """Scatters by (page, offset), so that no index ever counts elements and 32 bits are always enough.

    Truncating division sends a negative slot to a negative page or offset, and without JAX's wrapping of
    negative indices those are dropped like any other slot outside the pool.
    """
    page_size = slots.dtype.type(pages[0].shape[1])
    page, offset = jax.lax.div(slots, page_size), jax.lax.rem(slots, page_size)
    return tuple(
        pool.at[page, offset].set(
            value.astype(pool.dtype),
            mode="drop",
            unique_indices=True,
            wrap_negative_indices=False,
        )
        for pool, value in zip(pages, values, strict=True)
    )

"""Writes tokens into pages by XLA scatters, copy-free under donation. Knows nothing about what a page holds."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def scatter_tokens(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    values: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int[Array, " tokens"],
) -> tuple[Shaped[Array, "pages page_size ..."], ...]:
    """Returns the pages with one value per token scattered at (page, offset), cast to the pages' dtype.

    Indices never count elements, so 32 bits always suffice. Truncating division maps a negative slot to a negative page
    or offset; with JAX's wrapping of negative indices disabled it is dropped like any other slot outside of the pool.
    """
    values, slots = two_at_least(values, slots, pages[0].shape[0] * pages[0].shape[1])
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


def two_at_least(
    values: tuple[Shaped[Array, "tokens ..."], ...], slots: Int[Array, " tokens"], num_slots: int
) -> tuple[tuple[Shaped[Array, "tokens_and_one ..."], ...], Int[Array, " tokens_and_one"]]:
    """Appends a token with an invalid slot if there is only one token.

    On CPUs XLA rewrites a scatter of one token to a conditional slice update, and copies some pools for it.
    """
    if slots.shape[0] != 1:
        return values, slots
    twice = tuple(jnp.concatenate((value, value)) for value in values)
    return twice, jnp.concatenate((slots, jnp.full(1, num_slots + 1, slots.dtype)))

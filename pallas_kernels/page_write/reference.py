"""Reference of `page_write`: a loop over tokens, each of which writes its slot if the slot exists."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def page_write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    values: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int[Array, " tokens"],
) -> tuple[Shaped[Array, "pages page_size ..."], ...]:
    """Writes the tokens in order; a slot past the last page writes nothing."""

    def write(token: Int[Array, ""], flat: tuple[Array, ...]) -> tuple[Array, ...]:
        slot = slots[token]
        real = (slot >= 0) & (slot < flat[0].shape[0])
        here = jnp.arange(flat[0].shape[0], dtype=jnp.int32) == slot
        return tuple(
            jnp.where(
                (here & real).reshape(-1, *[1] * (pool.ndim - 1)),
                value[token][None].astype(pool.dtype),
                pool,
            )
            for pool, value in zip(flat, values, strict=True)
        )

    flat = tuple(pool.reshape(-1, *pool.shape[2:]) for pool in pages)
    flat = jax.lax.fori_loop(jnp.int32(0), jnp.int32(slots.shape[0]), write, flat)
    return tuple(new.reshape(pool.shape) for new, pool in zip(flat, pages, strict=True))

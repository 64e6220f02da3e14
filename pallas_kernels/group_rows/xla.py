"""`group_rows` in plain XLA: a stable sort."""

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def group_rows(
    x: Shaped[Array, "tokens width"], chosen: Int32[Array, "tokens count"], *, groups: int
) -> tuple[
    Shaped[Array, "rows width"],
    Int32[Array, " rows"],
    Int32[Array, "tokens count"],
    Int32[Array, " groups"],
]:
    """Implements `api.group_rows`."""
    picked = chosen.reshape(-1)
    order = jnp.argsort(picked, stable=True).astype(jnp.int32)
    is_of = picked[None, :] == jnp.arange(groups, dtype=jnp.int32)[:, None]
    sizes = jnp.sum(is_of.astype(jnp.int32), axis=1)
    position = jnp.arange(len(order), dtype=jnp.int32)
    places = jnp.zeros_like(order).at[order].set(position, unique_indices=True)
    return x[order // max(1, chosen.shape[1])], picked[order], places.reshape(chosen.shape), sizes

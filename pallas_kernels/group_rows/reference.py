"""Reference of `group_rows`: each pair's row is the number of pairs before it."""

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
    """Returns the rows, the group of each, the row of each pair, and the sizes of the groups."""
    tokens, count = chosen.shape
    picked, token = chosen.reshape(-1), jnp.repeat(jnp.arange(tokens), count)
    is_less = picked[None, :] < picked[:, None]
    is_earlier = (picked[None, :] == picked[:, None]) & (token[None, :] < token[:, None])
    places = jnp.sum(is_less | is_earlier, axis=1).astype(jnp.int32)
    row_tokens = jnp.zeros_like(token).at[places].set(token)
    row_groups = jnp.zeros_like(picked).at[places].set(picked)
    sizes = jnp.zeros(groups, jnp.int32).at[picked].add(1)
    return x[row_tokens], row_groups, places.reshape(chosen.shape), sizes

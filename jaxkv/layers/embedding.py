"""Token ids to vectors, and hidden states to logits. Knows nothing about which of the two tables are one."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.layers.linear import project


def embed(
    table: Float[Array, "vocab hidden_size"], tokens: Int[Array, " tokens"]
) -> Float[Array, "tokens hidden_size"]:
    """Looks up one row per token; an id outside the table gives zeros, never a neighbour's row."""
    return table.at[tokens].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def unembed(
    table: Float[Array, "vocab hidden_size"], hidden: Float[Array, "rows hidden_size"]
) -> Float[Array, "rows vocab"]:
    """Scores every token of the vocabulary, in float32 whatever the table's dtype."""
    return project(table, hidden, result=jnp.float32)

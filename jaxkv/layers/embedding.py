"""Token ids to vectors, and hidden states to logits. Knows nothing about which of the two tables are one."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.layers.linear import matmul, project


def embed(
    table: Float[Array, "vocab hidden_size"], tokens: Int[Array, " tokens"]
) -> Float[Array, "tokens hidden_size"]:
    """Looks up one row per token; an id outside the table gives zeros, never a neighbour's row."""
    return table.at[tokens].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def soft_capped(
    logits: Float[Array, "rows vocab"], cap: float | None
) -> Float[Array, "rows vocab"]:
    """Bounds logits by `cap * tanh(logits / cap)` (Gemma 2); `None` leaves them as they are."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def unembed(
    table: Float[Array, "vocab hidden_size"],
    hidden: Float[Array, "rows hidden_size"],
    *,
    implementation: str | None = "xla",
) -> Float[Array, "rows vocab"]:
    """Scores every token of the vocabulary, in float32 whatever the table's dtype; `implementation` as in `linear`."""
    if implementation != "xla":
        return matmul(table, hidden, result=jnp.float32, implementation=implementation)
    return project(table, hidden, result=jnp.float32)

"""Embedding of token ids, and projection of hidden states to logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.layers.linear import matmul, project


def embed(
    table: Float[Array, "vocab hidden_size"], tokens: Int[Array, " tokens"]
) -> Float[Array, "tokens hidden_size"]:
    """Returns one row of the table per token; zeros for an id outside the table."""
    return table.at[tokens].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def soft_capped(
    logits: Float[Array, "rows vocab"], cap: float | None
) -> Float[Array, "rows vocab"]:
    """Returns `cap * tanh(logits / cap)` (Gemma 2), or the logits unchanged if `cap` is `None`."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def unembed(
    table: Float[Array, "vocab hidden_size"],
    hidden: Float[Array, "rows hidden_size"],
    *,
    implementation: str | None = "xla",
) -> Float[Array, "rows vocab"]:
    """Returns float32 logits for any dtype of the table, on a family of implementations; `None` for the best."""
    if implementation != "xla":
        return matmul(table, hidden, result=jnp.float32, implementation=implementation)
    return project(table, hidden, result=jnp.float32)

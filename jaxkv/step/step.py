"""One step on the device: new tokens in, their keys and values remembered, one next token per row out.

Everything here is a pure function of arrays. Ids were checked where they were packed; the device trusts them.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.batch import StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Model, Params
from jaxkv.sampling.sample import Sampled, read_choices, sample, write_choices
from jaxkv.step.outputs import recall_outputs


def last_hidden(
    hidden: Float[Array, "tokens hidden_size"], batch: StepBatch
) -> Float[Array, "rows hidden_size"]:
    """Picks the hidden state of each row's last new token (any one for a row without tokens)."""
    if batch.decode:
        return hidden
    return hidden[jnp.maximum(batch.cu_q_lens[1:] - 1, 0)]


def resolve_carry(batch: StepBatch, last_token: Int[Array, " slots"]) -> Int[Array, " tokens"]:
    """Replaces the packed id of rows that carry on by the token the device sampled for them last."""
    carried = last_token.at[batch.sampling.slots].get(mode="fill", fill_value=0)
    carry = batch.sampling.carry.astype(bool)
    if batch.decode:
        return jnp.where(carry, carried, batch.tokens)
    # A row that does not carry writes out of range, at a place of its own, and is dropped.
    rows = jnp.arange(carry.shape[0], dtype=jnp.int32)
    target = jnp.where(carry, batch.cu_q_lens[:-1], batch.tokens.shape[0] + rows)
    return batch.tokens.at[target].set(carried, mode="drop", unique_indices=True)


def step(model: Model, params: Params, cache: Cache, batch: StepBatch) -> tuple[Cache, Sampled]:
    """Runs one step and chooses each row's next token.

    Donate `cache` where this is compiled: the result lies in the same memory.

    Args:
        model: what to compute; static.
        params: its parameters.
        cache: what is remembered before the step.
        batch: the step's metadata.

    Returns:
        What is remembered after it, and one token per row. Rows whose `slots` entry is out of range
        leave nothing behind in the sampling group.
    """
    choices = cache.layer(model.num_layers)
    batch = replace(batch, tokens=resolve_carry(batch, choices["last_token"]))
    cache, hidden = model.forward(params, cache, batch)
    last = last_hidden(hidden, batch)
    if "hidden" in choices:
        kept, last = recall_outputs(choices["hidden"], hidden, last, batch)
        choices = choices | {"hidden": kept}
    logits = model.logits(params, last)
    state = read_choices(choices, batch.sampling)
    sampled = sample(logits, batch.sampling, state, batch.seq_lens)
    choices = write_choices(choices, batch.sampling, sampled.tokens)
    return cache.with_layer(model.num_layers, choices), sampled

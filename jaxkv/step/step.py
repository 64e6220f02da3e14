"""One step on the device: computes the new tokens, writes them to the cache, and samples one next token per row.

All functions are pure functions of arrays. Page and state ids are checked on the host, where they are packed.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.batch import StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Model, Params
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.sample import Sampled, read_choices, write_choices
from jaxkv.step.outputs import recall_outputs
from jaxkv.step.sample_next import sample_next


def last_hidden(
    hidden: Float[Array, "tokens hidden_size"], batch: StepBatch
) -> Float[Array, "rows hidden_size"]:
    """Returns the hidden state of each row's last new token; arbitrary for a row without tokens."""
    if batch.decode:
        return hidden
    return hidden[jnp.maximum(batch.cu_q_lens[1:] - 1, 0)]


def resolve_carry(batch: StepBatch, last_token: Int[Array, " slots"]) -> Int[Array, " tokens"]:
    """Replaces the packed token id of rows with `carry` by the token that was sampled for them last."""
    carried = last_token.at[batch.sampling.state_ids].get(mode="fill", fill_value=0)
    carry = batch.sampling.carry.astype(bool)
    if batch.decode:
        return jnp.where(carry, carried, batch.tokens)
    # Rows without `carry` write out of range, each at its own index, and are dropped.
    rows = jnp.arange(carry.shape[0], dtype=jnp.int32)
    target = jnp.where(carry, batch.cu_q_lens[:-1], batch.tokens.shape[0] + rows)
    return batch.tokens.at[target].set(carried, mode="drop", unique_indices=True)


def step(model: Model, params: Params, cache: Cache, batch: StepBatch) -> tuple[Cache, Sampled]:
    """Runs one step and samples each row's next token.

    The caller donates `cache` when it compiles this function; the result uses the same memory.

    Args:
        model: the model; static.
        params: its parameters.
        cache: the cache before the step.
        batch: the step's metadata.

    Returns:
        The cache after the step, and one token per row. Rows whose `sampling.state_ids` entry is out of range write
        nothing to the sampling group.
    """
    cache, hidden = forward(model, params, cache, batch)
    choices = cache.layer(model.num_layers)
    choices, sampled = sample_tokens(model, params, choices, hidden, batch.sampling, batch.seq_lens)
    return cache.with_layer(model.num_layers, choices), sampled


def forward(
    model: Model, params: Params, cache: Cache, batch: StepBatch
) -> tuple[Cache, Float[Array, "rows hidden_size"]]:
    """Runs one step without its sampling; the arguments are those of `step`.

    The caller donates `cache` when it compiles this function; the result uses the same memory.

    Returns:
        The cache with the new tokens written, and the hidden state that each row samples from.
    """
    last_token = cache.layer(model.num_layers)["last_token"]
    batch = replace(batch, tokens=resolve_carry(batch, last_token))
    cache, hidden = model.forward(params, cache, batch)
    choices = cache.layer(model.num_layers)
    last = last_hidden(hidden, batch)
    if "hidden" in choices:
        outputs, last = recall_outputs(choices["hidden"], hidden, last, batch)
        cache = cache.with_layer(model.num_layers, {"hidden": outputs})
    return cache, last


def sample_tokens(
    model: Model,
    params: Params,
    choices: Mapping[str, Array],
    hidden: Float[Array, "rows hidden_size"],
    sampling: SamplingBatch,
    positions: Int[Array, " rows"],
) -> tuple[dict[str, Array], Sampled]:
    """Samples each row's next token from its hidden state.

    The caller donates `choices` when it compiles this function; the result uses the same memory.

    Args:
        model: the model; static.
        params: its parameters, of which only the output projection is read.
        choices: role -> array of the cache's sampling group.
        hidden: the hidden states that `forward` returned.
        sampling: the sampling inputs.
        positions: position of each sampled token.

    Returns:
        The arrays of the sampling group with the tokens written, and one token per row.
    """
    state = read_choices(choices, sampling)
    sampled = sample_next(model, params, hidden, sampling, state, positions)
    return write_choices(choices, sampling, sampled.tokens, positions), sampled

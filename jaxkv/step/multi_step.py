"""Several decode steps in one program, so that the host dispatches once for all of them.

Every row runs all steps that it takes part in. The host drops the tokens that a row sampled after its last one.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.batch import StateTables, StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Model, Params
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.sample import Sampled
from jaxkv.step.loop import NOWHERE, slots_at
from jaxkv.step.step import step


def decode_steps(
    model: Model,
    params: Params,
    cache: Cache,
    first: StepBatch,
    left: Int[Array, " rows"],
    *,
    page_sizes: tuple[int, ...],
    steps: int,
) -> tuple[Cache, Sampled]:
    """Runs decode steps in sequence; each step takes the tokens that the step before it sampled.

    Donate `cache` where this is compiled. The number of steps is static, so the program runs without the host.

    Args:
        model: the model; static.
        params: its parameters.
        cache: the cache before the first step.
        first: the batch of the first step; its page tables hold the pages that all steps write.
        left: number of steps that each row takes part in; 0 for padding rows.
        page_sizes: tokens per page of each paged group; static.
        steps: number of steps; static.

    Returns:
        The cache after the last step, and the sampled tokens with a leading axis of `steps`. The tokens of a row in a
        step that it takes no part in are undefined.
    """

    def advance(cache: Cache, index: Int[Array, ""]) -> tuple[Cache, Sampled]:
        return step(model, params, cache, batch_at(first, index, index < left, page_sizes))

    return jax.lax.scan(advance, cache, jnp.arange(steps, dtype=jnp.int32))


def batch_at(
    first: StepBatch,
    index: Int[Array, ""],
    running: Bool[Array, " rows"],
    page_sizes: tuple[int, ...],
) -> StepBatch:
    """Returns the batch of step `index`; rows that take no part in it have no tokens and write out of range."""
    rows = jnp.arange(running.shape[0], dtype=jnp.int32)
    later = index > 0
    positions = jnp.where(running, first.positions + index, 0)
    paged = tuple(
        replace(
            tables,
            # The first step's token may be in a shared page, which it must not write. Later tokens never are.
            write_slots=jnp.where(
                later, slots_at(tables, positions, running, page_size), tables.write_slots
            ),
        )
        for tables, page_size in zip(first.paged, page_sizes, strict=True)
    )
    states = tuple(
        StateTables(
            # The first step may read a shared state. Later steps read the state that it wrote.
            read_states=jnp.where(
                running, jnp.where(later, tables.write_states, tables.read_states), 0
            ),
            write_states=jnp.where(running, tables.write_states, NOWHERE + rows),
        )
        for tables in first.states
    )
    return replace(
        first,
        positions=positions,
        seq_lens=jnp.where(running, first.seq_lens + index, 0),
        paged=paged,
        states=states,
        sampling=replace(
            first.sampling,
            state_ids=jnp.where(running, first.sampling.state_ids, NOWHERE + rows),
            carry=jnp.where(later, jnp.ones_like(rows), first.sampling.carry),
            values=_values_of(first.sampling, index),
        ),
    )


def _values_of(sampling: SamplingBatch, index: Int[Array, ""]) -> dict[str, Array]:
    """Returns the sampling inputs of step `index`, which differ in the tokens that rows are given."""
    if sampling.features.logprobs is None:
        return sampling.values
    return sampling.values | {"given": jax.lax.dynamic_slice_in_dim(sampling["given"], index, 1, 1)}

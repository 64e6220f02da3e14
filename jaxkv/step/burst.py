"""Several decode steps in one program, so that the host is asked once for all of them.

Nobody ends here before its time: what a row chose after its last token, the host drops.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Model, Params
from jaxkv.sampling.sample import Sampled
from jaxkv.step.loop import NOWHERE, slots_at
from jaxkv.step.step import step


def decode_burst(
    model: Model,
    params: Params,
    cache: Cache,
    first: StepBatch,
    left: Int[Array, " rows"],
    *,
    page_sizes: tuple[int, ...],
    steps: int,
) -> tuple[Cache, Sampled]:
    """Runs decode steps one after the other; each takes the tokens that the one before it chose.

    Donate `cache` where this is compiled. How often the steps run is known to the compiler, so that nothing is asked of
    the host in between.

    Args:
        model: what to compute; static.
        params: its parameters.
        cache: what is remembered before the first step.
        first: the first of the steps, which writes where it says; its page tables hold every page that others write.
        left: how many of the steps each row takes part in; 0 for padding rows.
        page_sizes: tokens per page of each paged group; static.
        steps: how many there are; static.

    Returns:
        What is remembered after them, and what each chose, with an axis of `steps` before all others. Choices of a row
        that takes no part in a step mean nothing.
    """

    def advance(cache: Cache, turn: Int[Array, ""]) -> tuple[Cache, Sampled]:
        return step(model, params, cache, _batch_of(first, turn, turn < left, page_sizes))

    return jax.lax.scan(advance, cache, jnp.arange(steps, dtype=jnp.int32))


def _batch_of(
    first: StepBatch,
    turn: Int[Array, ""],
    running: Bool[Array, " rows"],
    page_sizes: tuple[int, ...],
) -> StepBatch:
    """Describes one of the steps; rows that take no part in it have no tokens and write nowhere."""
    rows = jnp.arange(running.shape[0], dtype=jnp.int32)
    later = turn > 0
    positions = jnp.where(running, first.positions + turn, 0)
    paged = tuple(
        PagedTables(
            page_table=tables.page_table,
            # The first step's token may lie in another's page already; those that are chosen here never do.
            write_slots=jnp.where(
                later, slots_at(tables, positions, running, page_size), tables.write_slots
            ),
        )
        for tables, page_size in zip(first.paged, page_sizes, strict=True)
    )
    states = tuple(
        StateTables(
            # What the first step read may be another's; the others go on from what it wrote.
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
        seq_lens=jnp.where(running, first.seq_lens + turn, 0),
        paged=paged,
        states=states,
        sampling=replace(
            first.sampling,
            slots=jnp.where(running, first.sampling.slots, NOWHERE + rows),
            carry=jnp.where(later, jnp.ones_like(rows), first.sampling.carry),
        ),
    )

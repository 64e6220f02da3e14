"""Prompt and decode in one trace: a step over the prompts, then steps in a `while_loop` until every row stopped.

It schedules nothing: the rows are fixed, their pages were taken beforehand. It is the oracle of the engine, and
what a trainer calls inside its own jitted function.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._pytree import pytree
from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Model, Params
from jaxkv.sampling.sample import Sampled
from jaxkv.step.step import step

RUNNING, STOP, LENGTH, ERROR = 0, 1, 2, 3
"""Why a row ended: not yet, a stop id, its limit, logits that were not finite."""


@pytree
class Limits:
    """When each row ends.

    Attributes:
        max_tokens: most tokens to generate; 0 for padding rows.
        min_tokens: stop ids are blocked before this many.
        stop_ids: ids that end the row, padded with ids at or past the vocabulary's end.
    """

    max_tokens: Int[Array, " rows"]
    min_tokens: Int[Array, " rows"]
    stop_ids: Int[Array, "rows stop_width"]


@pytree
class Generated:
    """What a loop produced; columns at or past a row's `lengths` hold 0.

    Attributes:
        tokens: generated ids, the stop id included.
        lengths: generated tokens per row.
        reasons: `STOP`, `LENGTH` or `ERROR`; `RUNNING` for padding rows.
        logprobs: the chosen tokens' natural log-probabilities, if asked for.
        top_ids, top_logprobs: the most likely tokens at each position, if asked for.
    """

    tokens: Int[Array, "rows max_tokens"]
    lengths: Int[Array, " rows"]
    reasons: Int[Array, " rows"]
    logprobs: Float[Array, "rows max_tokens"] | None = None
    top_ids: Int[Array, "rows max_tokens top"] | None = None
    top_logprobs: Float[Array, "rows max_tokens top"] | None = None


@pytree
class _Progress:
    """The loop's state: everything one iteration changes."""

    cache: Cache
    out: Generated
    last: Int[Array, " rows"]
    seq_lens: Int[Array, " rows"]
    iteration: Int[Array, ""]


def generate_loop(
    model: Model,
    params: Params,
    cache: Cache,
    prompt: StepBatch,
    limits: Limits,
    *,
    page_sizes: tuple[int, ...],
    max_tokens: int,
) -> tuple[Cache, Generated]:
    """Generates up to `max_tokens` tokens for each row of `prompt`.

    Donate `cache` where this is compiled.

    Args:
        model: what to compute; static.
        params: its parameters.
        cache: what is remembered before the prompts.
        prompt: a step over whole prompts; its page tables already hold every page the rows will need.
        limits: when each row ends.
        page_sizes: tokens per page of each paged group; static.
        max_tokens: width of the output; static. A row's own limit may be smaller.
    """
    cache, sampled = step(
        model, params, cache, _blocked(prompt, limits, jnp.zeros_like(limits.max_tokens))
    )
    progress = _Progress(
        cache=cache,
        out=_record(_blank(prompt, max_tokens), sampled, limits, jnp.int32(0)),
        last=sampled.tokens,
        seq_lens=prompt.seq_lens + 1,
        iteration=jnp.int32(1),
    )

    def unfinished(progress: _Progress) -> Bool[Array, ""]:
        running = (progress.out.reasons == RUNNING) & (limits.max_tokens > 0)
        return jnp.any(running) & (progress.iteration < max_tokens)

    def advance(progress: _Progress) -> _Progress:
        batch = _decode_batch(prompt, limits, progress, page_sizes)
        cache, sampled = step(model, params, progress.cache, batch)
        return _Progress(
            cache=cache,
            out=_record(progress.out, sampled, limits, progress.iteration),
            last=sampled.tokens,
            seq_lens=progress.seq_lens + 1,
            iteration=progress.iteration + 1,
        )

    progress = jax.lax.while_loop(unfinished, advance, progress)
    return progress.cache, progress.out


def _blocked(batch: StepBatch, limits: Limits, lengths: Int[Array, " rows"]) -> StepBatch:
    """Gives the step its stop ids, blocked in rows that are short of `min_tokens`."""
    if not batch.sampling.features.min_tokens:
        return batch
    block = (lengths < limits.min_tokens).astype(jnp.int32)
    values = batch.sampling.values | {"stop_ids": limits.stop_ids, "block_stop": block}
    sampling = replace(batch.sampling, values=values)
    return replace(batch, sampling=sampling)


def _decode_batch(
    prompt: StepBatch, limits: Limits, progress: _Progress, page_sizes: tuple[int, ...]
) -> StepBatch:
    """Describes one decode step; rows that ended have no tokens and write nowhere."""
    rows = jnp.arange(prompt.seq_lens.shape[0], dtype=jnp.int32)
    running = (progress.out.reasons == RUNNING) & (limits.max_tokens > 0)
    positions = jnp.where(running, progress.seq_lens - 1, 0)
    paged = tuple(
        PagedTables(
            page_table=tables.page_table,
            write_slots=slots_at(tables, positions, running, page_size),
        )
        for tables, page_size in zip(prompt.paged, page_sizes, strict=True)
    )
    # A decode step goes on from the state the prompt ended in.
    states = tuple(
        StateTables(
            read_states=jnp.where(running, tables.write_states, 0),
            write_states=jnp.where(running, tables.write_states, NOWHERE + rows),
        )
        for tables in prompt.states
    )
    batch = StepBatch(
        tokens=progress.last,
        positions=positions,
        cu_q_lens=jnp.arange(rows.shape[0] + 1, dtype=jnp.int32),
        seq_lens=jnp.where(running, progress.seq_lens, 0),
        paged=paged,
        states=states,
        sampling=replace(
            prompt.sampling,
            slots=jnp.where(running, prompt.sampling.slots, NOWHERE + rows),
            carry=jnp.zeros_like(rows),
        ),
        decode=True,
    )
    return _blocked(batch, limits, progress.out.lengths)


NOWHERE = 2**30
"""Past the end of every pool: a row that ended writes at `NOWHERE + row`, which is dropped."""


def slots_at(
    tables: PagedTables,
    positions: Int[Array, " rows"],
    running: Bool[Array, " rows"],
    page_size: int,
) -> Int[Array, " rows"]:
    """Returns where each row writes its token at a position, out of its page table; nowhere if it does not run."""
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)
    pages = tables.page_table[rows, positions // page_size]
    return jnp.where(running, pages * page_size + positions % page_size, NOWHERE + rows)


def _blank(prompt: StepBatch, max_tokens: int) -> Generated:
    rows = prompt.seq_lens.shape[0]
    top = prompt.sampling.features.logprobs
    asked = top is not None
    return Generated(
        tokens=jnp.zeros((rows, max_tokens), jnp.int32),
        lengths=jnp.zeros(rows, jnp.int32),
        reasons=jnp.full(rows, RUNNING, jnp.int32),
        logprobs=jnp.zeros((rows, max_tokens), jnp.float32) if asked else None,
        top_ids=jnp.zeros((rows, max_tokens, top), jnp.int32) if asked else None,
        top_logprobs=jnp.zeros((rows, max_tokens, top), jnp.float32) if asked else None,
    )


def _record(
    out: Generated, sampled: Sampled, limits: Limits, iteration: Int[Array, ""]
) -> Generated:
    """Writes one column of rows that still run, and ends those that met a stop id or a limit."""
    running = (out.reasons == RUNNING) & (limits.max_tokens > 0)
    kept = running & sampled.finite
    lengths = out.lengths + kept.astype(jnp.int32)
    stopped = jnp.any(sampled.tokens[:, None] == limits.stop_ids, axis=1)
    reason = jnp.where(lengths >= limits.max_tokens, LENGTH, RUNNING)
    reason = jnp.where(stopped, STOP, reason)
    reason = jnp.where(sampled.finite, reason, ERROR)

    def column(values: Array | None, new: Array | None) -> Array | None:
        if values is None or new is None:
            return None
        written = jnp.where(kept.reshape(-1, *(1,) * (new.ndim - 1)), new, jnp.zeros_like(new))
        return values.at[:, iteration].set(written)

    tokens = column(out.tokens, sampled.tokens)
    assert tokens is not None
    return Generated(
        tokens=tokens,
        lengths=lengths,
        reasons=jnp.where(running, reason, out.reasons),
        logprobs=column(out.logprobs, sampled.logprob),
        top_ids=column(out.top_ids, sampled.top_ids),
        top_logprobs=column(out.top_logprobs, sampled.top_logprobs),
    )

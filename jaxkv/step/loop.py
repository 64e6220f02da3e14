"""Prefill and decode in one program: a step over the prompts, then a `while_loop` of steps until all rows have ended.

The rows are fixed and their pages are allocated beforehand. The engine's tests compare with this loop, and users call
it inside their own jitted functions.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._pytree import pytree
from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Model, Params
from jaxkv.sampling.fields import NO_TOKEN
from jaxkv.sampling.sample import Sampled
from jaxkv.step.step import step

RUNNING, STOP, LENGTH, ERROR = 0, 1, 2, 3
"""Reasons of a row's end: none yet, a stop id, its limit of tokens, logits that are not finite."""


@pytree
class Limits:
    """The conditions of each row's end.

    Attributes:
        max_tokens: most tokens to generate; 0 for padding rows.
        min_tokens: stop ids are masked before this many tokens.
        stop_ids: ids that end the row, padded with ids out of the vocabulary.
    """

    max_tokens: Int[Array, " rows"]
    min_tokens: Int[Array, " rows"]
    stop_ids: Int[Array, "rows stop_width"]


@pytree
class Generated:
    """The result of a loop; columns from a row's `lengths` on are 0.

    Attributes:
        tokens: generated ids, the stop id included.
        lengths: number of generated tokens per row.
        reasons: `STOP`, `LENGTH` or `ERROR`; `RUNNING` for padding rows.
        logprobs: natural log-probabilities of the tokens; `None` if not requested.
        top_ids, top_logprobs: the most likely tokens at each position; `None` if not requested.
    """

    tokens: Int[Array, "rows max_tokens"]
    lengths: Int[Array, " rows"]
    reasons: Int[Array, " rows"]
    logprobs: Float[Array, "rows max_tokens"] | None = None
    top_ids: Int[Array, "rows max_tokens top"] | None = None
    top_logprobs: Float[Array, "rows max_tokens top"] | None = None


@pytree
class _Progress:
    """The state of the loop."""

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
    given: Int[Array, "rows max_tokens"] | None = None,
) -> tuple[Cache, Generated]:
    """Generates up to `max_tokens` tokens for each row of `prompt`.

    The caller donates `cache` when it compiles this function.

    Args:
        model: the model; static.
        params: its parameters.
        cache: the cache before the prompts.
        prompt: a step over whole prompts. Its page tables hold all pages that the rows will need.
        limits: the conditions of each row's end.
        page_sizes: tokens per page of each paged group; static.
        max_tokens: width of the output; static. A row's own limit may be smaller.
        given: tokens that the rows take in place of sampled ones, `NO_TOKEN` where they sample; `None` if and only if
            the program has no log-probabilities. A row ends at its limit of tokens, not at a stop id that it was given.

    Returns:
        The cache after the last step, and the generated tokens.
    """
    first = _blocked(prompt, limits, jnp.zeros_like(limits.max_tokens))
    cache, sampled = step(model, params, cache, _with_given(first, given, jnp.int32(0)))
    progress = _Progress(
        cache=cache,
        out=_record(_blank(prompt, max_tokens), sampled, limits, given, jnp.int32(0)),
        last=sampled.tokens,
        seq_lens=prompt.seq_lens + 1,
        iteration=jnp.int32(1),
    )

    def unfinished(progress: _Progress) -> Bool[Array, ""]:
        running = (progress.out.reasons == RUNNING) & (limits.max_tokens > 0)
        return jnp.any(running) & (progress.iteration < max_tokens)

    def advance(progress: _Progress) -> _Progress:
        batch = _decode_batch(prompt, limits, progress, page_sizes)
        batch = _with_given(batch, given, progress.iteration)
        cache, sampled = step(model, params, progress.cache, batch)
        return _Progress(
            cache=cache,
            out=_record(progress.out, sampled, limits, given, progress.iteration),
            last=sampled.tokens,
            seq_lens=progress.seq_lens + 1,
            iteration=progress.iteration + 1,
        )

    progress = jax.lax.while_loop(unfinished, advance, progress)
    return progress.cache, progress.out


def _blocked(batch: StepBatch, limits: Limits, lengths: Int[Array, " rows"]) -> StepBatch:
    """Returns the batch with stop ids, which are masked in rows with fewer than `min_tokens` tokens."""
    if not batch.sampling.features.min_tokens:
        return batch
    block = (lengths < limits.min_tokens).astype(jnp.int32)
    values = batch.sampling.values | {"stop_ids": limits.stop_ids, "block_stop": block}
    sampling = replace(batch.sampling, values=values)
    return replace(batch, sampling=sampling)


def _with_given(
    batch: StepBatch, given: Int[Array, "rows max_tokens"] | None, iteration: Int[Array, ""]
) -> StepBatch:
    """Returns the batch with the tokens that the rows are given in this iteration, if the program reads them."""
    if given is None:
        return batch
    column = jax.lax.dynamic_slice_in_dim(given, iteration, 1, axis=1)
    values = batch.sampling.values | {"given": column}
    return replace(batch, sampling=replace(batch.sampling, values=values))


def _decode_batch(
    prompt: StepBatch, limits: Limits, progress: _Progress, page_sizes: tuple[int, ...]
) -> StepBatch:
    """Returns the batch of one decode step; rows that have ended have no tokens, and their writes are dropped."""
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
    # Decode steps read and write the state that the prompt's step wrote.
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
            state_ids=jnp.where(running, prompt.sampling.state_ids, NOWHERE + rows),
            carry=jnp.zeros_like(rows),
        ),
        decode=True,
    )
    return _blocked(batch, limits, progress.out.lengths)


NOWHERE = 2**30
"""An index out of every pool: rows that have ended write at `NOWHERE + row`, which is dropped."""


def slots_at(
    tables: PagedTables,
    positions: Int[Array, " rows"],
    running: Bool[Array, " rows"],
    page_size: int,
) -> Int[Array, " rows"]:
    """Returns the slot of each row's token at a position, from its page table; out of range if it is not running."""
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
    out: Generated,
    sampled: Sampled,
    limits: Limits,
    given: Int[Array, "rows max_tokens"] | None,
    iteration: Int[Array, ""],
) -> Generated:
    """Writes one column for the running rows, and ends those at a stop id, a limit or an error."""
    running = (out.reasons == RUNNING) & (limits.max_tokens > 0)
    kept = running & sampled.finite
    lengths = out.lengths + kept.astype(jnp.int32)
    stopped = jnp.any(sampled.tokens[:, None] == limits.stop_ids, axis=1)
    if given is not None:
        stopped &= given[:, iteration] == NO_TOKEN
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

"""Drafts by a smaller model: one pass over the end of each text, then a decode step for each further draft."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.batch import PagedTables, StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Model, Params
from jaxkv.step.loop import NOWHERE
from jaxkv.step.multi_step import decode_steps
from jaxkv.step.step import step


def draft_chain(
    model: Model,
    params: Params,
    cache: Cache,
    rows: StepBatch,
    texts: Int[Array, "rows max_tokens"],
    lengths: Int[Array, " rows"],
    capacity: Int[Array, " rows"],
    *,
    most: int,
    page_sizes: tuple[int, ...],
) -> tuple[Cache, Int[Array, "rows most"]]:
    """Returns `most` drafts of each row: the tokens that the smaller model samples behind its text.

    The caller donates `cache` when it compiles this function. A verified step adds at most `most + 1` tokens to a text,
    so the first pass computes that many again, and all before them must be computed. Random numbers are those of the
    position, so a draft is the token that the verifying model draws there if both models give it the same scores.

    Args:
        model: the smaller model, without recurrent layers; static.
        params: its parameters.
        cache: its cache.
        rows: page tables and sampling inputs of the rows, as a decode step has them; the rest is not read.
        texts: ids of prompt and output; anything behind the first `lengths`.
        lengths: tokens of each row; 0 for padding.
        capacity: tokens that the pages of each row hold.
        most: number of drafts of a row; static.
        page_sizes: tokens per page of each paged group; static.

    Returns:
        The cache, and the drafts; 0 for rows with too short a text, or without room in their pages.
    """
    again = most + 1
    drafts_fit = (lengths >= again) & (lengths + most - 1 <= capacity)
    start = jnp.where(drafts_fit, lengths - again, 0)
    columns = jnp.arange(again, dtype=jnp.int32)[None, :]
    positions = start[:, None] + columns
    count = lengths.shape[0]
    owner = jnp.repeat(jnp.arange(count, dtype=jnp.int32), again)
    state_ids = jnp.where(drafts_fit, rows.sampling.state_ids, NOWHERE + jnp.arange(count))
    sampling = replace(rows.sampling, state_ids=state_ids, carry=jnp.zeros_like(lengths))
    end_of_text = replace(
        rows,
        tokens=jnp.take_along_axis(texts, positions, axis=1).reshape(-1),
        positions=positions.reshape(-1),
        cu_q_lens=jnp.arange(count + 1, dtype=jnp.int32) * again,
        # A row that does not draft writes nothing, and its token is dropped.
        seq_lens=start + again,
        paged=_with_slots(rows, owner, positions.reshape(-1), drafts_fit[owner], page_sizes),
        sampling=sampling,
        decode=False,
    )
    cache, first = step(model, params, cache, end_of_text)
    drafts = first.tokens[:, None]
    if most > 1:
        row = jnp.arange(count, dtype=jnp.int32)
        decode = replace(
            rows,
            tokens=first.tokens,
            positions=jnp.where(drafts_fit, lengths, 0),
            cu_q_lens=jnp.arange(count + 1, dtype=jnp.int32),
            seq_lens=jnp.where(drafts_fit, lengths + 1, 0),
            paged=_with_slots(rows, row, lengths, drafts_fit, page_sizes),
            sampling=replace(sampling, carry=jnp.ones_like(lengths)),
            decode=True,
        )
        left = jnp.where(drafts_fit, most - 1, 0)
        cache, more = decode_steps(
            model, params, cache, decode, left, page_sizes=page_sizes, steps=most - 1
        )
        drafts = jnp.concatenate([drafts, more.tokens.T], axis=1)
    return cache, jnp.where(drafts_fit[:, None], drafts, 0)


def _with_slots(
    rows: StepBatch,
    owner: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    written: Bool[Array, " tokens"],
    page_sizes: tuple[int, ...],
) -> tuple[PagedTables, ...]:
    """Returns the tables with a slot for each token; out of range for those that are not written.

    Args:
        rows: the rows' page tables.
        owner: row of each token.
        positions: position of each token.
        written: which tokens are written.
        page_sizes: tokens per page of each paged group.
    """
    nowhere = NOWHERE + jnp.arange(owner.shape[0], dtype=jnp.int32)
    return tuple(
        replace(
            tables,
            write_slots=jnp.where(
                written,
                tables.page_table.at[owner, positions // size].get(mode="clip") * size
                + positions % size,
                nowhere,
            ),
        )
        for tables, size in zip(rows.paged, page_sizes, strict=True)
    )

"""Drafts by a smaller model or a head: one pass over the end of each text, then a step for each further draft."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._pytree import pytree
from jaxkv.batch import PagedTables, StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.draft_heads.head import AHEAD, DraftHead
from jaxkv.models.protocol import Model, Params
from jaxkv.step.loop import NOWHERE
from jaxkv.step.multi_step import batch_at
from jaxkv.step.step import forward, sample_tokens


@pytree
class KeptHidden:
    """Hidden states that the verifying model keeps in pages, of the end of each row's text.

    Attributes:
        pages: the pool.
        first_page: position of the first column of `page_table` in the row's whole table.
        page_table: page ids of each row.
    """

    pages: Float[Array, "pages page_size width"]
    first_page: Int[Array, " rows"]
    page_table: Int[Array, "rows few_pages"]

    def at(
        self, owner: Int[Array, " tokens"], positions: Int[Array, " tokens"]
    ) -> Float[Array, "tokens width"]:
        """Returns the hidden state at each position of a row; those of any other token where the table lacks it."""
        page, place = jnp.divmod(positions, self.pages.shape[1])
        column = jnp.clip(page - self.first_page[owner], 0, self.page_table.shape[1] - 1)
        return self.pages.at[self.page_table[owner, column], place].get(mode="clip")


def draft_chain(
    model: Model,
    params: Params,
    cache: Cache,
    rows: StepBatch,
    texts: Int[Array, "rows max_tokens"],
    lengths: Int[Array, " rows"],
    capacity: Int[Array, " rows"],
    kept: KeptHidden | None = None,
    *,
    most: int,
    page_sizes: tuple[int, ...],
) -> tuple[Cache, Int[Array, "rows most"]]:
    """Returns `most` drafts of each row: the tokens that the smaller model or head samples behind its text.

    The caller donates `cache` when it compiles this function. A verified step adds at most `most + 1` tokens to a text,
    so the first pass computes that many again, and all before them must be computed. Random numbers are those of the
    position, so a draft is the token that the verifying model draws there if both models give it the same scores.

    Args:
        model: the smaller model, without recurrent layers, or the head; static.
        params: its parameters.
        cache: its cache.
        rows: page tables and sampling inputs of the rows, as a decode step has them; the rest is not read.
        texts: ids of prompt and output; anything behind the first `lengths`.
        lengths: tokens of each row; 0 for padding.
        capacity: tokens that the pages of each row hold.
        kept: hidden states of the verifying model, for a head; a head's own follow them in the chain.
        most: number of drafts of a row; static.
        page_sizes: tokens per page of each paged group; static.

    Returns:
        The cache, and the drafts; 0 for rows with too short a text, or without room in their pages.
    """
    again, head = most + 1, model if isinstance(model, DraftHead) else None
    # How far a token of the text is ahead of its position in the model, and the positions that have one.
    ahead = 0 if head is None else AHEAD
    held = lengths - ahead
    drafts_fit = (held >= again) & (held + most - 1 <= capacity)
    rows = _of_drafting(rows, drafts_fit)
    start = jnp.where(drafts_fit, held - again, 0)
    batch = _end_of_text(rows, texts, start, drafts_fit, page_sizes, again=again, ahead=ahead)
    if head is not None:
        assert kept is not None, "a head reads what the verifying model keeps"
        owner = jnp.repeat(jnp.arange(len(held), dtype=jnp.int32), again)
        batch = replace(batch, hidden=head.projected(params, kept.at(owner, batch.positions)))
    cache, last, first = _drawn(model, params, cache, batch, ahead)
    drafts = first[:, None]
    if most > 1:
        decode = _first_step(rows, first, held, drafts_fit, page_sizes)
        left = jnp.where(drafts_fit, most - 1, 0)

        def advance(
            state: tuple[Cache, Array], index: Int[Array, ""]
        ) -> tuple[tuple[Cache, Array], Int[Array, " rows"]]:
            cache, last = state
            batch = batch_at(decode, index, index < left, page_sizes)
            batch = batch if head is None else replace(batch, hidden=last)
            cache, last, tokens = _drawn(model, params, cache, batch, ahead)
            return (cache, last), tokens

        steps = jnp.arange(most - 1, dtype=jnp.int32)
        (cache, _), more = jax.lax.scan(advance, (cache, last), steps)
        drafts = jnp.concatenate([drafts, more.T], axis=1)
    return cache, jnp.where(drafts_fit[:, None], drafts, 0)


def _of_drafting(rows: StepBatch, drafts_fit: Bool[Array, " rows"]) -> StepBatch:
    """Returns the rows with entries out of range for those that do not draft, whose tokens are dropped."""
    nowhere = NOWHERE + jnp.arange(len(drafts_fit), dtype=jnp.int32)
    state_ids = jnp.where(drafts_fit, rows.sampling.state_ids, nowhere)
    return replace(rows, sampling=replace(rows.sampling, state_ids=state_ids))


def _end_of_text(
    rows: StepBatch,
    texts: Int[Array, "rows max_tokens"],
    start: Int[Array, " rows"],
    drafts_fit: Bool[Array, " rows"],
    page_sizes: tuple[int, ...],
    *,
    again: int,
    ahead: int,
) -> StepBatch:
    """Returns the batch of `again` positions of each row from `start` on; a row that does not draft writes nothing."""
    count = start.shape[0]
    positions = start[:, None] + jnp.arange(again, dtype=jnp.int32)[None, :]
    tokens = jnp.take_along_axis(texts, positions + ahead, axis=1).reshape(-1)
    owner = jnp.repeat(jnp.arange(count, dtype=jnp.int32), again)
    positions = positions.reshape(-1)
    return replace(
        rows,
        tokens=tokens,
        positions=positions,
        cu_q_lens=jnp.arange(count + 1, dtype=jnp.int32) * again,
        seq_lens=start + again,
        paged=_with_slots(rows, owner, positions, drafts_fit[owner], page_sizes),
        sampling=replace(rows.sampling, carry=jnp.zeros_like(start)),
        decode=False,
    )


def _first_step(
    rows: StepBatch,
    tokens: Int[Array, " rows"],
    held: Int[Array, " rows"],
    drafts_fit: Bool[Array, " rows"],
    page_sizes: tuple[int, ...],
) -> StepBatch:
    """Returns the batch of the step behind the first draft, at position `held` of each row."""
    count = held.shape[0]
    row = jnp.arange(count, dtype=jnp.int32)
    return replace(
        rows,
        tokens=tokens,
        positions=jnp.where(drafts_fit, held, 0),
        cu_q_lens=jnp.arange(count + 1, dtype=jnp.int32),
        seq_lens=jnp.where(drafts_fit, held + 1, 0),
        paged=_with_slots(rows, row, held, drafts_fit, page_sizes),
        sampling=replace(rows.sampling, carry=jnp.ones_like(held)),
        decode=True,
    )


def _drawn(
    model: Model, params: Params, cache: Cache, batch: StepBatch, ahead: int
) -> tuple[Cache, Float[Array, "rows hidden_size"], Int[Array, " rows"]]:
    """Runs a step; returns the cache, and per row the last hidden state and the token that is sampled from it.

    Args:
        model: the model.
        params: its parameters.
        cache: the cache before the step.
        batch: the step's metadata.
        ahead: how far a token of the text is ahead of its position in the model.
    """
    layer = model.num_layers
    cache, last = forward(model, params, cache, batch)
    choices, drawn = sample_tokens(
        model, params, cache.layer(layer), last, batch.sampling, batch.seq_lens + ahead
    )
    return cache.with_layer(layer, choices), last, drawn.tokens


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

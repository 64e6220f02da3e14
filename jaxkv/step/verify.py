"""One step that verifies drafts: it samples the token after each position, and accepts drafts that equal it.

A row's tokens are its next token and the drafts behind it. The token of every position is the one that a step without
drafts would sample there, because random numbers depend on seed and position alone. So drafts change no token.

Recurrent states are written last, from the accepted tokens alone: rejected drafts cannot be taken back from a state.

With a `TextDrafter` the step ends with the drafts of the next one. A row with `carry` takes its token, its drafts and
its position from the device, so the host can send the next step before it has read how many drafts were accepted.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv._pytree import pytree
from jaxkv.batch import PagedTables, StepBatch
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Model, Params, TakesBack
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.fields import NO_TOKEN
from jaxkv.sampling.sample import Sampled, SamplingState, read_choices, write_choices
from jaxkv.step.loop import NOWHERE
from jaxkv.step.sample_next import sample_next
from jaxkv.step.step import resolve_carry
from jaxkv.step.text_drafter import TextDrafter


@pytree
class Verified:
    """The tokens of a step that verifies drafts.

    Attributes:
        sampled: the sampled tokens, with a leading axis of positions. Those behind a row's first `accepted + 1` were
            sampled after a wrong token and are invalid.
        accepted: number of drafts of each row that equal the sampled tokens, counted up to the first that does not.
    """

    sampled: Sampled
    accepted: Int[Array, " rows"]


def verify_step(
    model: Model,
    params: Params,
    cache: Cache,
    batch: StepBatch,
    drafts: Int[Array, " rows"],
    *,
    most: int,
    page_sizes: tuple[int, ...],
    drafter: TextDrafter | None = None,
) -> tuple[Cache, Verified]:
    """Runs one step whose rows end with drafts, and samples the token after each position.

    The caller donates `cache` when it compiles this function. Keys and values of drafts that are not accepted stay in
    the cache behind the row's length; the next step of the row writes its own over them. The sampling group gets the
    accepted tokens and the one after them.

    Args:
        model: the model; static. With recurrent layers it is a `TakesBack`.
        params: its parameters.
        cache: the cache before the step.
        batch: the step's metadata; the last `drafts` tokens of each row are drafts. With a drafter, tokens, positions
            and write slots of rows with `carry` have any value.
        drafts: number of drafts of each row; at least one token of a row is none.
        most: most drafts of a row; static.
        page_sizes: tokens per page of each paged group; static.
        drafter: makes the drafts of the next step; the cache keeps texts and drafts for it. `None` for none; static.
    """
    choices = cache.layer(model.num_layers)
    if drafter is not None:
        batch = _with_own_drafts(batch, drafts, choices, most, page_sizes)
    else:
        batch = replace(batch, tokens=resolve_carry(batch, choices["last_token"]))
    recurrent = model if batch.states and isinstance(model, TakesBack) else None
    if recurrent is not None:
        cache, hidden, writes = recurrent.forward_unsettled(params, cache, batch)
    else:
        assert not batch.states, "an engine refuses drafts for such a model"
        (cache, hidden), writes = model.forward(params, cache, batch), None
    # Read again, since the model may write to this layer too: the experts that its routers chose.
    choices = cache.layer(model.num_layers)
    rows, width = drafts.shape[0], most + 1
    columns = jnp.arange(width, dtype=jnp.int32)[None, :]
    # Packed index of the token before each sampled one. Columns behind a row's drafts repeat its last token.
    places = batch.cu_q_lens[1:, None] - 1 - drafts[:, None]
    places = jnp.maximum(places + jnp.minimum(columns, drafts[:, None]), 0)
    drafted = batch.tokens.at[places + 1].get(mode="fill", fill_value=NO_TOKEN)[:, :most]
    drafted = jnp.where(columns[:, :most] < drafts[:, None], drafted, NO_TOKEN)
    first = batch.seq_lens - drafts
    positions = first[:, None] + columns
    read = hidden[places.reshape(-1)]
    sampling = _for_each_position(batch.sampling, width)
    state = _with_drafts(read_choices(choices, sampling), drafted, first)
    sampled = sample_next(model, params, read, sampling, state, positions.reshape(-1))
    sampled = jax.tree.map(
        lambda values: jnp.moveaxis(values.reshape(rows, width, *values.shape[1:]), 1, 0), sampled
    )
    right = (drafted == sampled.tokens[:most].T) & sampled.finite[:most].T
    accepted = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    choices = _write_accepted(dict(choices), batch.sampling, sampled.tokens, first, accepted)
    if recurrent is not None:
        cache = recurrent.settled(cache, batch, writes, drafts - accepted)
    if "hidden" in choices:
        last, ids = hidden[places[:, 0] + accepted], batch.states[-1].write_states
        kept = choices["hidden"].at[ids].set(last.astype(choices["hidden"].dtype), mode="drop")
        choices |= {"hidden": kept}
    if drafter is not None:
        choices = _write_drafts(choices, batch.sampling, drafter)
    return cache.with_layer(model.num_layers, choices), Verified(sampled=sampled, accepted=accepted)


def _with_own_drafts(
    batch: StepBatch,
    drafts: Int[Array, " rows"],
    choices: Mapping[str, Array],
    most: int,
    page_sizes: tuple[int, ...],
) -> StepBatch:
    """Returns the batch with the tokens, positions and lengths that the device has for the rows with `carry`."""
    state_ids, carry = batch.sampling.state_ids, batch.sampling.carry.astype(bool)

    def of_rows(role: str) -> Array:
        return choices[role].at[state_ids].get(mode="fill", fill_value=0)

    known = jnp.concatenate([of_rows("last_token")[:, None], of_rows("drafts")[:, :most]], axis=1)
    start = jnp.maximum(of_rows("text_length") - 1, 0)
    # Padding tokens come after the last row's; they stay what they are.
    index = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    # Not by bisection, whose loop XLA would leave out of the CUDA graph.
    row = jnp.sum(index[:, None] >= batch.cu_q_lens[None, 1:], axis=1, dtype=jnp.int32)
    own = carry.at[row].get(mode="fill", fill_value=False)
    row = jnp.minimum(row, carry.shape[0] - 1)
    column = jnp.clip(index - batch.cu_q_lens[row], 0, most)
    positions = jnp.where(own, start[row] + column, batch.positions)
    return replace(
        batch,
        tokens=jnp.where(own, known[row, column], batch.tokens),
        positions=positions,
        seq_lens=jnp.where(carry, start + 1 + drafts, batch.seq_lens),
        paged=tuple(
            _with_own_slots(tables, row, positions, own, page_size)
            for tables, page_size in zip(batch.paged, page_sizes, strict=True)
        ),
    )


def _with_own_slots(
    tables: PagedTables,
    row: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    own: Bool[Array, " tokens"],
    page_size: int,
) -> PagedTables:
    """Returns the tables with the slots of some tokens from their positions; none of these is in a shared page."""
    page, offset = positions // page_size, positions % page_size
    slots = tables.page_table.at[row, page].get(mode="clip") * page_size + offset
    return replace(tables, write_slots=jnp.where(own, slots, tables.write_slots))


def _for_each_position(sampling: SamplingBatch, width: int) -> SamplingBatch:
    """Returns the sampling inputs with one row per position: row 0 `width` times, then row 1, and so on."""

    def repeated(values: Array) -> Array:
        return jnp.repeat(values, width, axis=0)

    values = {
        # This one has a column for each position already.
        name: each.reshape(-1) if name == "block_stop" else repeated(each)
        for name, each in sampling.values.items()
    }
    return replace(
        sampling,
        state_ids=repeated(sampling.state_ids),
        carry=repeated(sampling.carry),
        values=values,
    )


def _with_drafts(
    state: SamplingState | None, drafted: Int[Array, "rows most"], first: Int[Array, " rows"]
) -> SamplingState | None:
    """Returns the states that each position would have if all drafts before it were accepted.

    Args:
        state: the rows' states, one for each position.
        drafted: the drafts of each row, padded with `NO_TOKEN`, which no array has room for.
        first: position of the first sampled token of each row.
    """
    if state is None:
        return None
    rows, most = drafted.shape
    width = most + 1
    earlier = jnp.arange(most)[None, :] < jnp.arange(width)[:, None]
    before = jnp.where(earlier[None], drafted[:, None, :], NO_TOKEN).reshape(rows * width, most)
    index = jnp.arange(rows * width, dtype=jnp.int32)[:, None]
    if state.output_counts is not None:
        counts = state.output_counts.at[index, before].add(1, mode="drop")
        state = replace(state, output_counts=counts)
    if state.token_history is not None:
        columns = first[:, None] + jnp.arange(most, dtype=jnp.int32)[None, :]
        columns = jnp.repeat(columns, width, axis=0)
        columns = jnp.where(before == NO_TOKEN, NO_TOKEN, columns)
        history = state.token_history.at[index, columns].set(before, mode="drop")
        state = replace(state, token_history=history)
    return state


def _write_accepted(
    choices: dict[str, Array],
    sampling: SamplingBatch,
    tokens: Int[Array, "positions rows"],
    first: Int[Array, " rows"],
    accepted: Int[Array, " rows"],
) -> dict[str, Array]:
    """Returns the sampling group with each row's accepted tokens and the one after them written."""
    rows = jnp.arange(accepted.shape[0], dtype=jnp.int32)
    if not sampling.features.penalties:
        # Only the last token is kept, and the text.
        last = jnp.take_along_axis(tokens, accepted[None, :], axis=0)[0]
        choices = write_choices(choices, sampling, last, first + accepted)
    else:
        for column in range(tokens.shape[0]):
            state_ids = jnp.where(column <= accepted, sampling.state_ids, NOWHERE + rows)
            taken = replace(sampling, state_ids=state_ids)
            choices = write_choices(choices, taken, tokens[column], first + column)
    if "token_history" not in choices:
        return choices
    columns = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    texts = choices["token_history"]
    places = jnp.where(columns <= accepted[None, :], first[None, :] + columns, texts.shape[1])
    texts = texts.at[sampling.state_ids[None, :], places].set(tokens, mode="drop")
    return choices | {"token_history": texts}


def _write_drafts(
    choices: dict[str, Array],
    sampling: SamplingBatch,
    drafter: TextDrafter,
) -> dict[str, Array]:
    """Returns the sampling group with the drafts of the tokens behind each row's text: all that it keeps."""
    state_ids, most = sampling.state_ids, choices["drafts"].shape[1]
    columns = jnp.arange(most, dtype=jnp.int32)
    texts, lengths = (
        choices[role].at[state_ids].get(mode="fill", fill_value=0)
        for role in ("token_history", "text_length")
    )
    kept = choices["drafts"].at[state_ids[:, None], columns[None, :]]
    drafts = drafter.draft(texts, lengths, most)
    return choices | {"drafts": kept.set(drafts, mode="drop", unique_indices=True)}

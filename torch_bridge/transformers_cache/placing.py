"""Reserves pages and states for a forward's tokens, and finds the leading columns that the prefix index holds."""

import numpy as np
from transformers import PreTrainedModel

from torch_bridge.sharing.leases import Lease
from torch_bridge.transformers_cache.fingerprint import KnownModel, turns_with_length
from torch_bridge.transformers_cache.forward_call import ForwardCall
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.store import Store


def place(
    call: ForwardCall,
    model: PreTrainedModel,
    known: KnownModel,
    sequences: Sequences,
    lease: Lease,
) -> tuple[np.ndarray, int, int]:
    """Appends a forward's columns to the rows; opens the rows if there are none.

    Returns:
        `(real, left_out, reused)`: which of the computed columns hold tokens, bool [rows, queries]; the number of
        leading columns that are not computed; and the number of tokens in these.

    Raises:
        ValueError: the number of rows differs from the cache's, or the mask does not fit.
        OutOfPages: the pool is too small (`OutOfStates` for states).
    """
    if not sequences.rows or call.shape[1] > 1:
        # One token after others is a decode step; the model is assumed unchanged since the step before.
        notice_changes(model, known, sequences.store)
    left_out = 0
    if sequences.rows:
        if call.shape[0] != len(sequences.rows):
            raise ValueError(
                f"the cache holds {len(sequences.rows)} rows, this forward has {call.shape[0]}; reset() it first"
            )
        real = call.real_columns(sequences.real, has_pages=sequences.has_pages)
    else:
        everything = call.real_columns(np.zeros((call.shape[0], 0), bool))
        left_out = _begin_rows(call, model, sequences, everything)
        real = everything[:, left_out:]
    reused = int(sequences.real[:, :left_out].sum())
    sequences.grow(real, lease)
    return real, left_out, reused


def notice_changes(model: PreTrainedModel, known: KnownModel, store: Store) -> None:
    """Clears the prefix index if the model's fingerprint has changed.

    Rows that began before the change publish no more pages.
    """
    if not store.index.why_never and not turns_with_length(model):
        store.notice(known.fingerprint())


def _begin_rows(
    call: ForwardCall, model: PreTrainedModel, sequences: Sequences, real: np.ndarray
) -> int:
    """Opens the rows of a new batch and returns how many leading columns the prefix index holds."""
    ids = None if turns_with_length(model) else call.ids
    texts: list[list[int] | None] = [None] * len(real)
    if ids is not None:
        usual = sequences.are_texts(real, call.positions, 0, real.shape[1])
        lines = zip(ids.to("cpu").numpy(), real, usual, strict=True)
        texts = [line[shown].tolist() if fits else None for line, shown, fits in lines]
    return sequences.open_rows(texts, real, call.can_leave_out(model.config))

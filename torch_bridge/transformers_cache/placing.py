"""Finds places in the pool for what a forward brings: rows that are new or go on, and what is there already."""

import numpy as np
from transformers import PreTrainedModel

from torch_bridge.sharing.leases import Lease
from torch_bridge.transformers_cache.fingerprint import fingerprint, turns_with_length
from torch_bridge.transformers_cache.forward_call import ForwardCall
from torch_bridge.transformers_cache.sequences import Sequences, usual_positions


def place(
    call: ForwardCall, model: PreTrainedModel, sequences: Sequences, lease: Lease
) -> tuple[np.ndarray, int, int]:
    """Appends a forward's columns to the rows, which begin with it if there are none.

    Returns:
        Which of its columns are real, [rows, queries], without those that need not be computed; how many columns those
        are; and how many real tokens they hold.

    Raises:
        ValueError: another number of rows than are remembered, or a mask that does not fit.
        OutOfPages: the pool is too small (`OutOfStates` for states).
    """
    if not sequences.rows or call.shape[1] > 1:
        # One token after others is within a text that is being generated, where nobody changes the model.
        _notice_changes(model, sequences)
    left_out = 0
    if sequences.rows:
        if call.shape[0] != len(sequences.rows):
            raise ValueError(
                f"the cache holds {len(sequences.rows)} rows, this forward has {call.shape[0]}; reset() it first"
            )
        real = call.real_columns(sequences.real)
    else:
        everything = call.real_columns(np.zeros((call.shape[0], 0), bool))
        left_out = _begin_rows(call, model, sequences, everything)
        real = everything[:, left_out:]
    reused = int(sequences.real[:, :left_out].sum())
    sequences.grow(real, lease)
    return real, left_out, reused


def _notice_changes(model: PreTrainedModel, sequences: Sequences) -> None:
    """Makes the index forget its prefixes if the model computes other keys than before.

    Rows that began before a change publish nothing more.
    """
    store = sequences.store
    if not store.index.why_never and not turns_with_length(model):
        store.notice(fingerprint(model))


def _begin_rows(
    call: ForwardCall, model: PreTrainedModel, sequences: Sequences, real: np.ndarray
) -> int:
    """Opens a row for each of the batch and returns how many columns are there already."""
    ids = None if turns_with_length(model) else call.ids
    texts: list[list[int] | None] = [None] * len(real)
    if ids is not None:
        usual = usual_positions(real, call.positions, 0, real.shape[1])
        lines = zip(ids.to("cpu").numpy(), real, usual, strict=True)
        texts = [line[shown].tolist() if fits else None for line, shown, fits in lines]
    return sequences.begin(texts, real, call.can_leave_out(model.config))

"""Reserves pages and states for a forward's tokens, and finds the leading columns that the prefix index holds."""

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from torch_bridge.sharing.leases import Lease
from torch_bridge.transformers_cache.fingerprint import KnownModel, turns_with_length
from torch_bridge.transformers_cache.forward_call import ForwardCall
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.store import Store

_COUNTS_OTHERWISE = (
    "bamba",
    "camembert",
    "data2vec-text",
    "kosmos_2_5_text_model",
    "kosmos_2_text_model",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Types of decoders for which a column's number is not its position where no `position_ids` are given: Bamba begins at
0 in each forward, and RoBERTa behind the id of its padding."""


def place(
    call: ForwardCall,
    model: PreTrainedModel,
    sequences: Sequences,
    lease: Lease,
    compare: Callable[[], None],
) -> tuple[np.ndarray, int, int]:
    """Appends a forward's columns to the rows; opens the rows if there are none.

    Args:
        call: the forward.
        model: the model.
        sequences: the rows.
        lease: a write lease of the pool.
        compare: compares the model with its last state, or begins to. It is called before the prefix index is read,
            and after all that is read from the device, since that would wait for the checksum of the weights.

    Returns:
        `(real, left_out, reused)`: which of the computed columns hold tokens, bool [rows, queries]; the number of
        leading columns that are not computed; and the number of tokens in these.

    Raises:
        ValueError: the number of rows differs from the cache's, or the mask does not fit.
        OutOfPages: the pool is too small (`OutOfStates` for states).
    """
    left_out = 0
    if sequences.rows:
        if call.shape[0] != len(sequences.rows):
            raise ValueError(
                f"the cache holds {len(sequences.rows)} rows, this forward has {call.shape[0]}; reset() it first"
            )
        real = call.real_columns(sequences.real, has_pages=sequences.has_pages)
        if call.shape[1] > 1:
            # One token after others is a decode step; the model is assumed unchanged since the step before.
            compare()
    else:
        everything = call.real_columns(np.zeros((call.shape[0], 0), bool))
        texts = _texts(call, model, sequences, everything)
        compare()
        # Where no row has a text, padding stays too: an argument that is not known may have an entry for each column.
        has_text = any(text is not None for text in texts)
        most = call.can_leave_out(model.config) if has_text else 0
        left_out = sequences.open_rows(texts, everything, most)
        real = everything[:, left_out:]
    reused = int(sequences.real[:, :left_out].sum())
    sequences.grow(real, lease)
    return real, left_out, reused


def known_ids(call: ForwardCall, model: PreTrainedModel) -> torch.Tensor | None:
    """Returns the token ids of a forward, [rows, queries], if the keys depend on no other argument; else `None`."""
    return None if call.positions is None and _counts_otherwise(model) else call.ids


def _counts_otherwise(model: PreTrainedModel) -> bool:
    """Whether a column's number is not its position where no `position_ids` are given."""
    # Models of images and text add what the positions of their last images left behind.
    adds = any(hasattr(one, "rope_deltas") for one in (model, model.base_model))
    return adds or model.config.get_text_config(decoder=True).model_type in _COUNTS_OTHERWISE


def begin_comparison(model: PreTrainedModel, known: KnownModel, store: Store) -> Callable[[], bool]:
    """Queues the checksums of the model; returns a function that waits for them and compares all of the model.

    The function clears the prefix index if the model has changed, and returns whether it has. Rows that began before it
    was called then publish no more pages.
    """
    if store.index.why_never or turns_with_length(model):
        return lambda: False
    finish = known.begin_fingerprint()
    return lambda: store.notice(finish())


def _texts(
    call: ForwardCall, model: PreTrainedModel, sequences: Sequences, real: np.ndarray
) -> list[list[int] | None]:
    """Returns the token ids of each row of a new batch; `None` where they do not determine the keys."""
    ids = None if turns_with_length(model) else known_ids(call, model)
    if ids is None:
        return [None] * len(real)
    usual = sequences.are_texts(real, call.positions, 0, real.shape[1])
    lines = zip(ids.to("cpu").numpy(), real, usual, strict=True)
    return [line[shown].tolist() if fits else None for line, shown, fits in lines]

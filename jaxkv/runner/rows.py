"""The rows of a step, the input of the packer: one by one, or as columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from jaxkv.config.sampling import SamplingParams
from jaxkv.sampling.fields import RequestSampling


@dataclass(frozen=True)
class Row:
    """One row of a step: the new tokens of one sequence.

    Attributes:
        sequence: its number in the page allocator, which holds its pages and states.
        tokens: the new token ids; with `carry`, one id of any value.
        start: position of the first new token.
        params: the request's sampling parameters.
        seed: 64-bit seed of this sample.
        emits: the sampled token counts: the row is a decode step or the last prefill chunk of a prompt.
        carry: the new token is the one that this sequence sampled last; the device reads it from the sampling group.
        generated: number of tokens generated before this step.
        stop_ids: ids that end the request.
        adapter_slot: 1 + the index of the request's adapter in the stack of adapters; 0 for none.
    """

    sequence: int
    tokens: Sequence[int]
    start: int
    params: SamplingParams
    seed: int = 0
    emits: bool = True
    carry: bool = False
    generated: int = 0
    stop_ids: tuple[int, ...] = ()
    adapter_slot: int = 0


class PendingCheckpoint(NamedTuple):
    """A pending state checkpoint: the states of one sequence that a step writes in the middle of its tokens.

    Attributes:
        row: index of the row.
        length: tokens of the sequence before the checkpoint. It lies within the row's new tokens, at a multiple of the
            model's chunk size or at the end of the row.
        states: recurrent group's name -> id of the state that the step writes.
    """

    row: int
    length: int
    states: Mapping[str, int]


class StepRows(NamedTuple):
    """The rows of one step as columns.

    Attributes:
        sequences, starts, emits, carry: see `Row`.
        tokens: new token ids of all rows, one row after the other.
        lens: number of new tokens of each row.
        generated: see `Row`; may be empty if no row has `min_tokens`.
        sampling: sampling parameters of each row; a request passes the same object at each step.
        pending_checkpoints: the pending state checkpoints of the step, sorted by row, then by length.
        left: how many of the program's steps each row takes part in; empty for programs of one step.
        masks: mask of the tokens that each row may sample, see `jaxkv.sampling.token_mask`; `None` for a row without a
            grammar, or whose token is not used. Rows may have one array in common, which is sent once. May be empty if
            no row has one.
        given: the tokens that each row takes in the program's steps in place of sampled ones, which a program with
            log-probabilities reads; an empty one for a row that samples. May be empty if all rows sample.
        drafts: how many of each row's last tokens are drafts to verify; may be empty if there are none.
    """

    sequences: Sequence[int]
    tokens: Sequence[int]
    lens: Sequence[int]
    starts: Sequence[int]
    emits: Sequence[bool]
    carry: Sequence[bool]
    generated: Sequence[int]
    sampling: Sequence[RequestSampling]
    pending_checkpoints: Sequence[PendingCheckpoint] = ()
    left: Sequence[int] = ()
    masks: Sequence[np.ndarray | None] = ()
    given: Sequence[Sequence[int]] = ()
    drafts: Sequence[int] = ()

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "StepRows":
        """Returns the columns of some rows."""
        return cls(
            sequences=[row.sequence for row in rows],
            tokens=list(chain.from_iterable(row.tokens for row in rows)),
            lens=[len(row.tokens) for row in rows],
            starts=[row.start for row in rows],
            emits=[row.emits for row in rows],
            carry=[row.carry for row in rows],
            generated=[row.generated for row in rows],
            sampling=rows,
        )


def num_masks(masks: Sequence[np.ndarray | None]) -> int:
    """Returns how many different masks rows have, see `StepRows.masks`."""
    return len({id(mask) for mask in masks if mask is not None})

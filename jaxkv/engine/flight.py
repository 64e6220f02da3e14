"""A step on its way: what its rows ask of the device, and how its results are found again. Decides nothing."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from jaxkv.batch import Features
from jaxkv.engine.offline import report_logprobs
from jaxkv.engine.results import SampledRows
from jaxkv.engine.rows import Row
from jaxkv.engine.sequence import Sequence
from jaxkv.engine.step_plan import Part


@dataclass(frozen=True)
class Flight:
    """A step that was dispatched and not read.

    Attributes:
        parts: its rows, in order, each with the epoch of its sequence.
        out: its packed choices.
        features: what these choices hold.
    """

    parts: tuple[tuple[Part, int], ...]
    out: Array
    features: Features


def row_of(part: Part) -> Row:
    """Describes a part to the packer; a token that the host has not read yet is read on the device."""
    sequence, request = part.sequence, part.sequence.request
    stop = part.start + part.count
    return Row(
        sequence=sequence.number,
        tokens=(0,) if part.carry else sequence.tokens[part.start : stop],
        start=part.start,
        params=request.params,
        seed=request.seed,
        emits=part.emits,
        carry=part.carry,
        generated=sequence.generated + sequence.pending,
        stop_ids=request.stop_ids,
    )


def report(
    sequence: Sequence, token: int, index: int, rows: SampledRows
) -> dict[int, float] | None:
    """Returns the log-probabilities that a sequence asked for, out of its row of a step's choices."""
    top = sequence.request.params.logprobs
    if top is None:
        return None
    return report_logprobs(
        token,
        float(rows.logprob[index]),
        np.asarray(rows.top_ids[index, :top]),
        np.asarray(rows.top_logprobs[index, :top]),
    )

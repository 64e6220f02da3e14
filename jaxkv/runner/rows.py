"""The rows of a step as the host decided them: one by one, or as columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from jaxkv.config.sampling import SamplingParams
from jaxkv.sampling.fields import Choice


@dataclass(frozen=True)
class Row:
    """One sequence's part in a step, as the host decided it.

    Attributes:
        sequence: its number in the page allocator, which hold its pages and states.
        tokens: the new token ids; one, of any value, if `carry`.
        start: position of the first of them.
        params: the request's sampling parameters, with `seed` settled.
        seed: 64-bit seed of this sample.
        emits: the step's token for this row counts (the last chunk of a prompt, or a decode step).
        carry: the new token is the one this row sampled last, read on the device.
        generated: tokens generated before this step.
        stop_ids: ids that end the row.
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


class Snapshot(NamedTuple):
    """States that a step keeps on its way.

    Attributes:
        row: whose they are.
        length: tokens of that sequence after which they are kept: among the row's new ones, at a multiple of the
            model's chunk or at the row's end.
        states: recurrent group's name -> where they are kept.
    """

    row: int
    length: int
    states: Mapping[str, int]


class StepRows(NamedTuple):
    """The rows of one step as columns, which is what the packer takes.

    Attributes:
        sequences, tokens, starts, emits, carry: see `Row`; the tokens of all rows, one row after the other.
        lens: new tokens of each row.
        generated: see `Row`; may be empty if no row has `min_tokens`.
        choices: how each row chooses its tokens, the same object at each of its steps.
        snapshots: what the step keeps on its way, by row, then by length.
        left: in how many of a program's steps each row takes part; empty for programs of one step.
    """

    sequences: Sequence[int]
    tokens: Sequence[int]
    lens: Sequence[int]
    starts: Sequence[int]
    emits: Sequence[bool]
    carry: Sequence[bool]
    generated: Sequence[int]
    choices: Sequence[Choice]
    snapshots: Sequence[Snapshot] = ()
    left: Sequence[int] = ()

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "StepRows":
        """Lays rows side by side."""
        return cls(
            sequences=[row.sequence for row in rows],
            tokens=list(chain.from_iterable(row.tokens for row in rows)),
            lens=[len(row.tokens) for row in rows],
            starts=[row.start for row in rows],
            emits=[row.emits for row in rows],
            carry=[row.carry for row in rows],
            generated=[row.generated for row in rows],
            choices=rows,
        )

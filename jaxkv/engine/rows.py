"""One sequence's part in a step, as the host decided it. Knows no arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

from jaxkv.config import MAX_LOGPROBS, SamplingParams
from jaxkv.features import Features

LOGPROB_SIZES = (0, 5, MAX_LOGPROBS)
"""How many of the most likely tokens programs report."""

STOP_WIDTH = 72
"""Stop ids a request may carry: `MAX_STOP_IDS` of its own and a few of the model's."""


@runtime_checkable
class Wish(Protocol):
    """What stays the same of a row from step to step; a `Row` has it, and so has a `Request`."""

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen."""
        ...

    @property
    def seed(self) -> int:
        """Its 64-bit seed."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end it."""
        ...


@dataclass(frozen=True)
class Row:
    """One sequence's part in a step, as the host decided it.

    Attributes:
        sequence: its number in the accounts, which hold its pages and states.
        tokens: the new token ids; one, of any value, if `carry`.
        start: position of the first of them.
        params: the request's sampling parameters, with `seed` settled.
        seed: 64-bit seed of this sample.
        emits: the step's token for this row counts (the last chunk of a prompt, or a decode step).
        carry: the new token is the one this row sampled last, read on the device.
        generated: tokens generated before this step.
        max_tokens: most tokens this row may still generate; read by `loop` programs.
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
    max_tokens: int = 1
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


class Columns(NamedTuple):
    """The rows of one step, side by side: what may be another in each step, and their wishes.

    Attributes:
        sequences, tokens, starts, emits, carry: see `Row`; the tokens of all rows, one row after the other.
        lens: new tokens of each row.
        generated: see `Row`; may be empty if no row has `min_tokens`.
        wishes: what each was asked for, the same object at each of its steps.
        max_tokens: see `Row`; empty but for `loop` programs.
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
    wishes: Sequence[Wish]
    max_tokens: Sequence[int] = ()
    snapshots: Sequence[Snapshot] = ()
    left: Sequence[int] = ()


def columns_of(rows: Sequence[Row]) -> Columns:
    """Lays rows side by side."""
    return Columns(
        sequences=[row.sequence for row in rows],
        tokens=list(chain.from_iterable(row.tokens for row in rows)),
        lens=[len(row.tokens) for row in rows],
        starts=[row.start for row in rows],
        emits=[row.emits for row in rows],
        carry=[row.carry for row in rows],
        generated=[row.generated for row in rows],
        wishes=rows,
        max_tokens=[row.max_tokens for row in rows],
    )


def features_of(wishes: Iterable[Wish]) -> Features:
    """Returns the least a program must be able to do to serve rows of these wishes."""
    return unite([features_for(wish.params) for wish in wishes])


def features_for(params: SamplingParams) -> Features:
    """Returns what one row needs; equal answers are one object, so that comparing them costs nothing."""
    # Few sizes, so that few programs serve all wishes; who asked for less gets less.
    top = next((size for size in LOGPROB_SIZES if size >= (params.logprobs or 0)), None)
    return _one_object(
        Features(
            draws=params.temperature > 0,
            filters=params.uses_filters,
            penalties=bool(params.uses_penalties or params.logit_bias),
            min_tokens=params.min_tokens > 0,
            logprobs=None if params.logprobs is None else top,
        )
    )


def unite(several: Sequence[Features]) -> Features:
    """Returns what serves all of these."""
    if several.count(several[0]) == len(several):
        return several[0]
    kinds = set(several)
    logprobs = [one.logprobs for one in kinds if one.logprobs is not None]
    return Features(
        draws=any(one.draws for one in kinds),
        filters=any(one.filters for one in kinds),
        penalties=any(one.penalties for one in kinds),
        min_tokens=any(one.min_tokens for one in kinds),
        logprobs=max(logprobs, default=None),
    )


@cache
def _one_object(features: Features) -> Features:
    return features


def split_seed(seed: int) -> tuple[int, int]:
    """Splits a 64-bit seed into two numbers an int32 can hold."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return tuple(half - 2**32 if half >= 2**31 else half for half in (low, high))  # type: ignore[return-value]

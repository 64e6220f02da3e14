"""What one step does, as the scheduler decided it: who takes part with which tokens. Knows no arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxkv.cache.page_allocator import PageCopy
from jaxkv.engine.request_state import RequestState


class Part(NamedTuple):
    """One sequence's part in a step. A tuple, since every row of every step has one.

    Attributes:
        sequence: whose it is.
        start, count: its new tokens; none, if all are known and only the next one is to be chosen. In a plan of several
            steps, those of all that it takes part in, of which all but the first are chosen on the way.
        emits: how many of the tokens chosen for it count: 1 or 0, and in a plan of several steps as many as `count`.
        carry: its one new token is the last one chosen for it, which the host has not read.
    """

    sequence: RequestState
    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - hides a method that nobody calls
    emits: int
    carry: bool


@dataclass(frozen=True)
class StepPlan:
    """What the next step does, and what has to be done on the device before it.

    Attributes:
        parts: who takes part; may be empty.
        fresh: sequences that took a new entry of the sampling group, by its id.
        copies: shared pages and states that are about to be written, and whose they become.
        preempted: who gave way.
        steps: how many decode steps are sent as one program; in all but the first, each part takes the token that it
            chose in the one before.
    """

    parts: tuple[Part, ...]
    fresh: tuple[tuple[RequestState, int], ...]
    copies: tuple[tuple[RequestState, PageCopy], ...]
    preempted: tuple[RequestState, ...]
    steps: int = 1

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do at all."""
        return not (self.parts or self.fresh or self.copies)


def part_of(sequence: RequestState, count: int) -> Part:
    """Returns the part of a sequence that computes its next `count` tokens."""
    start, known = sequence.computed, len(sequence.tokens)
    stop = start + count
    assert stop <= sequence.reserved, "a plan takes the pages before it gives tokens"
    emits = stop == known + sequence.pending and not sequence.other_samples
    return Part(sequence, start, count, int(emits), count > 0 and start >= known)


def several(part: Part, steps: int) -> Part:
    """Returns the part of a sequence that generates, in so many steps at once or as many as it has tokens left."""
    sequence = part.sequence
    left = min(steps, sequence.longest - len(sequence.tokens) - sequence.pending)
    return part._replace(count=left, emits=left)


def single(part: Part) -> Part:
    """Returns the first step of a part that takes part in several."""
    return part._replace(count=1, emits=1)


def trim(wanted: list[tuple[RequestState, int]], excess: int) -> None:
    """Takes tokens from the last prompts, which go on in a later step."""
    while excess:
        sequence, count = wanted.pop()
        if count > excess:
            wanted.append((sequence, count - excess))
        excess -= min(count, excess)


def align(
    wanted: list[tuple[RequestState, int]], before: Sequence[tuple[RequestState, int]], chunk: int
) -> None:
    """Ends prompts that go on in a later step at a multiple of `chunk` tokens, so that their states depend on no cut.

    A prompt that would get nothing so waits, but the first one gets on: up to the next multiple if it had that
    many tokens `before` it was trimmed, and else with as many as it had.
    """
    for index in reversed(range(len(wanted))):
        sequence, count = wanted[index]
        stop = sequence.computed + count
        if stop == sequence.goal or stop % chunk == 0:
            continue
        if count > stop % chunk:
            wanted[index] = sequence, count - stop % chunk
        elif index:
            del wanted[index]
        else:
            wanted[0] = sequence, min(before[0][1], chunk - sequence.computed % chunk)

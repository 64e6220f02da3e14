"""What one step does, as the scheduler decided it: who takes part with which tokens. Knows no arrays."""

from dataclasses import dataclass

from jaxkv.cache.accounts import PageCopy
from jaxkv.engine.sequence import Sequence


@dataclass(frozen=True)
class Part:
    """One sequence's part in a step.

    Attributes:
        start, count: its new tokens.
        emits: the token that the step chooses for it counts.
        carry: its one new token is the last one chosen for it, which the host has not read.
    """

    sequence: Sequence
    start: int
    count: int
    emits: bool
    carry: bool


@dataclass(frozen=True)
class StepPlan:
    """What the next step does, and what has to be done on the device before it.

    Attributes:
        parts: who takes part; may be empty.
        fresh: sequences that took a new entry of the sampling group, by its id.
        copies: shared pages and states that are about to be written, and whose they become.
        preempted: who gave way.
    """

    parts: tuple[Part, ...]
    fresh: tuple[tuple[Sequence, int], ...]
    copies: tuple[tuple[Sequence, PageCopy], ...]
    preempted: tuple[Sequence, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do at all."""
        return not (self.parts or self.fresh or self.copies)


def part_of(sequence: Sequence, count: int) -> Part:
    """Returns the part of a sequence that computes its next `count` tokens."""
    stop = sequence.computed + count
    assert stop <= sequence.reserved, "a plan takes the pages before it gives tokens"
    emits = not sequence.followers and stop == sequence.goal
    carry = sequence.computed >= len(sequence.tokens)
    return Part(sequence, sequence.computed, count, emits, carry)


def trim(wanted: list[tuple[Sequence, int]], excess: int) -> None:
    """Takes tokens from the last prompts, which go on in a later step."""
    while excess:
        sequence, count = wanted.pop()
        if count > excess:
            wanted.append((sequence, count - excess))
        excess -= min(count, excess)

"""`Speculation`: which rows of a step get drafts, how many of them are accepted, and when drafting pauses.

A request whose drafts are being verified has an unknown length until the step is read. So while an engine drafts, it
reads each step before it plans the next one. Imports no JAX.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxkv.engine.request_state import RequestState
from jaxkv.engine.speculation.drafter import Drafter
from jaxkv.engine.step_plan import Part

WINDOW = 32
"""Steps after which it is decided whether drafts pay."""

LEAST_TOKENS = 1.15
"""Tokens per row and step below which drafting pauses.

A step that verifies drafts costs a little more than another one, and the device waits for the host after it.
"""

_FIRST_PAUSE, _LONGEST_PAUSE = 64, 1024
"""Steps without drafts after the first window that did not pay, and the most after several in succession."""


@dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """How many drafts were accepted.

    Attributes:
        drafted: per position behind a row's next token, how many drafts were verified.
        accepted: per position, how many of them were accepted.
        steps: steps in which drafting was on.
        pauses: how often drafting paused because too few drafts were accepted.
        is_paused: whether it pauses now.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    steps: int
    pauses: int
    is_paused: bool

    def __str__(self) -> str:
        """Returns the share of accepted drafts at each position, in one line."""
        shares = [
            f"{accepted / drafted:.0%}" if drafted else "-"
            for drafted, accepted in zip(self.drafted, self.accepted, strict=True)
        ]
        state = "paused" if self.is_paused else "on"
        return (
            f"drafts are {state}: {sum(self.accepted):,} of {sum(self.drafted):,} accepted, by position "
            f"{', '.join(shares)}; {self.steps:,} steps, {self.pauses:,} pauses"
        )


class Speculation:
    """Drafts for the steps of one engine.

    Args:
        drafter: guesses the tokens.
        tokens: most drafts of a row.
        most_rows: returns the most rows of a step that verifies drafts.

    Attributes:
        drafter: guesses the tokens.
    """

    def __init__(self, drafter: Drafter, tokens: int, most_rows: Callable[[], int]) -> None:
        self.drafter = drafter
        self._tokens = tokens
        self._most_rows = most_rows
        self._drafted, self._accepted = [0] * tokens, [0] * tokens
        self._steps = self._pauses = 0
        # Of the window: steps, decode rows and accepted drafts.
        self._window_steps = self._window_rows = self._window_accepted = 0
        self._pause, self._pause_left = _FIRST_PAUSE, 0

    @property
    def stats(self) -> SpeculationStats:
        """How many drafts were accepted so far."""
        return SpeculationStats(
            drafted=tuple(self._drafted),
            accepted=tuple(self._accepted),
            steps=self._steps,
            pauses=self._pauses,
            is_paused=self._pause_left > 0,
        )

    def is_active(self, running: Sequence[RequestState]) -> bool:
        """Whether the next step may verify drafts of these requests, so that it needs all their tokens on the host."""
        return (
            not self._pause_left
            and 0 < len(running) <= self._most_rows()
            and any(may_speculate(one) for one in running)
        )

    def draft(self, parts: Sequence[Part]) -> list[tuple[int, ...]]:
        """Returns the drafts of each part of a step; all parts are decode parts."""
        nothing: list[tuple[int, ...]] = [()] * len(parts)
        if self._pause_left:
            self._pause_left -= 1
            return nothing
        if not 0 < len(parts) <= self._most_rows():
            return nothing
        room = [self._room(part) for part in parts]
        asked = [index for index, most in enumerate(room) if most > 0]
        if not asked:
            return nothing
        self._decide()
        if self._pause_left:
            return nothing
        self._steps += 1
        self._window_steps += 1
        self._window_rows += len(parts)
        guesses = self.drafter.draft(
            [parts[index].sequence for index in asked], [room[index] for index in asked]
        )
        for index, guess in zip(asked, guesses, strict=True):
            nothing[index] = tuple(guess[: room[index]])
        return nothing

    def note(self, drafted: int, accepted: int) -> None:
        """Records the drafts of one row of a step that was read.

        Args:
            drafted: number of its drafts.
            accepted: how many of them were accepted.
        """
        for position in range(drafted):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted
        self._window_accepted += accepted

    def _room(self, part: Part) -> int:
        """Returns the most drafts of a part: the last token of a request follows no draft."""
        sequence = part.sequence
        if sequence.pending or not may_speculate(sequence):
            return 0
        return min(self._tokens, sequence.longest - len(sequence.tokens) - 1)

    def _decide(self) -> None:
        """At the end of a window, begins a pause unless drafts paid."""
        if self._window_steps < WINDOW:
            return
        paid = self._window_rows + self._window_accepted >= LEAST_TOKENS * self._window_rows
        self._window_steps = self._window_rows = self._window_accepted = 0
        if paid:
            self._pause = _FIRST_PAUSE
            return
        self._pauses += 1
        self._pause_left = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def may_speculate(sequence: RequestState) -> bool:
    """Whether a request takes drafts: not while a grammar allows some tokens only, nor if its tokens are given."""
    return sequence.constraint is None and not (sequence.request.given or sequence.other_samples)

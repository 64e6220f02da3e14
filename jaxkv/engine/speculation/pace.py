"""`Pace`: measures what drafts gain or lose, and so decides when to draft. Imports no JAX.

Drafts gain tokens per step, and their steps are longer. What prevails depends on model, machine, batch and text, so it
is measured while requests are served. A credit of seconds bounds the loss: drafts spend it while they lose, earn it
while they gain, and pause once it is spent.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

PLAIN_STEPS = 8
"""Steps without drafts that are measured before the first one with drafts."""

RATE = 0.01
"""Share of the time without drafts that a later search for a gain may lose."""

_WINDOW = 16
"""Steps without drafts over which their time is measured."""

_FIRST_CREDIT, _MOST_CREDIT = 1.0, 8.0
"""Credit at the beginning and after a pause, and at most, in steps without drafts."""

_STEPS_PER_CHECK = 512
"""Steps with drafts after which steps without them are measured again, since texts and batches change."""

_LONGEST = 8.0
"""A step that takes longer than so many without drafts is ignored, unless the one before did too: a compilation."""


@dataclass(slots=True)
class _SizeClass:
    """What was measured with batches of about one size.

    Attributes:
        plain: (seconds, tokens) of the last steps without drafts.
        credit: seconds that drafts may lose; `None` before enough steps without drafts were measured.
        is_paused: whether the credit is spent.
        drafted: steps with drafts since those without were measured.
        was_long: whether the last step with drafts was ignored.
    """

    plain: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    credit: float | None = None
    is_paused: bool = False
    drafted: int = 0
    was_long: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether the time of steps without drafts is known."""
        return len(self.plain) >= PLAIN_STEPS

    @property
    def step_seconds(self) -> float:
        """Median time of a step without drafts, which one compilation does not change."""
        return statistics.median([seconds for seconds, _ in self.plain])

    @property
    def token_seconds(self) -> float:
        """Median time of a step without drafts, by the median number of its tokens."""
        return self.step_seconds / max(1, statistics.median([count for _, count in self.plain]))


@dataclass(frozen=True, slots=True)
class _LastStep:
    """The last step that was planned: its rows, the tokens read by then, when, and the ways of it and the one before.

    The tokens of a step are read one or two steps later, so the step after one with drafts is counted with it.
    """

    rows: Sequence[int]
    length: int
    planned: float
    drafts: bool
    drafts_before: bool


class Pace:
    """Decides for each step of decode rows alone whether it has drafts.

    While a token takes longer with drafts than without, all searches for a gain together lose about `RATE` of the time
    without drafts, and one step more at the beginning.

    Args:
        clock: returns seconds; must be monotonic.
        adaptive: False to have drafts in every step.

    Attributes:
        pauses: how often drafts have not paid.
    """

    def __init__(self, clock: Callable[[], float], *, adaptive: bool = True) -> None:
        self._clock, self._adaptive = clock, adaptive
        self.pauses = 0
        self._classes: defaultdict[int, _SizeClass] = defaultdict(_SizeClass)
        self._last: _LastStep | None = None
        self._current = _SizeClass()

    @property
    def is_paused(self) -> bool:
        """Whether drafts have not paid lately, in batches of the last size."""
        return self._current.is_paused

    def may_draft(self, rows: int) -> bool:
        """Whether the next step of so many rows may have drafts."""
        if not self._adaptive:
            return True
        measured = self._classes[_class_of(rows)]
        return measured.is_measured and not measured.is_paused

    def interrupt(self) -> None:
        """The next step is none of decode rows alone; it is not measured."""
        self._last = None

    def next_step(self, rows: Sequence[int], length: int) -> bool:
        """Measures the step before; returns whether the next one has drafts.

        Args:
            rows: numbers of the requests of the next step; each of them generates.
            length: tokens of all of them together that the host has read.
        """
        if not self._adaptive:
            return True
        now, last = self._clock(), self._last
        self._current = current = self._classes[_class_of(len(rows))]
        if last is not None and last.rows == rows:
            seconds, tokens = now - last.planned, length - last.length
            if last.drafts or last.drafts_before:
                self._charge(current, seconds, tokens)
            else:
                _add_plain(current, seconds, tokens)
        drafts = self.may_draft(len(rows))
        current.drafted += drafts
        if current.drafted >= _STEPS_PER_CHECK:
            current.drafted = 0
            current.plain.clear()
        self._last = _LastStep(rows, length, now, drafts, last is not None and last.drafts)
        return drafts

    def _charge(self, measured: _SizeClass, seconds: float, tokens: int) -> None:
        """Subtracts from the credit what a step took longer than its tokens take without drafts."""
        if not measured.is_measured or measured.credit is None:
            return
        step = measured.step_seconds
        is_long = seconds > _LONGEST * step
        was_long, measured.was_long = measured.was_long, is_long
        if is_long and not was_long:
            return
        gained = measured.credit + tokens * measured.token_seconds - seconds
        measured.credit = min(gained, _MOST_CREDIT * step)
        if measured.credit <= 0 and not measured.is_paused:
            measured.is_paused = True
            self.pauses += 1


def _add_plain(measured: _SizeClass, seconds: float, tokens: int) -> None:
    """Records a step without drafts; its time adds to the credit until drafts may be tried again."""
    measured.plain.append((seconds, tokens))
    if not measured.is_measured:
        return
    step = measured.step_seconds
    if measured.credit is None:
        measured.credit = _FIRST_CREDIT * step
    elif measured.is_paused:
        measured.credit += RATE * min(seconds, 2 * step)
        measured.is_paused = measured.credit < _FIRST_CREDIT * step


def _class_of(rows: int) -> int:
    """Returns the size class of a batch; its steps take about as long as one another."""
    return rows.bit_length()

"""`Pace`: measures what drafts gain and cost, and so decides how many each row gets. Imports no JAX.

Drafts gain tokens per step, and their steps are longer. What prevails depends on model, machine, batch and text, so it
is measured while requests are served: the share of right drafts at each position, and the time of steps by rows and
drafts. Their quotient, tokens per second, decides how many drafts there are. A credit of seconds decides whether there
are any, and bounds the loss: drafts spend it while they lose, earn it while they gain, and pause once it is spent.
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

_REST = 16
"""Steps without drafts of a pause, at least."""

_STEPS_PER_CHECK = 512
"""Steps with drafts after which all times are measured again, since texts and batches change."""

_STEPS_PER_CHOICE = 4
"""Steps with one number of drafts before another is chosen, so that its time is measured."""

_LONGEST = 8.0
"""A step that takes longer than so many without drafts is ignored, unless the one before did too: a compilation."""

_FADE = 1 - 1 / 24
"""What counts of right drafts are multiplied by for each further step, since texts change."""

_LEAST_SECONDS = 1e-9
"""A step takes at least as long, on any clock."""

_FIRST_SHARE, _DOUBT = 0.5, 2.0
"""Share of right drafts before there are any, and how many drafts this guess weighs."""


class Acceptance:
    """Estimates how many tokens a row's drafts give.

    A draft is tried only if all before it are right. Where few were tried lately, the estimate is near that of the
    position before, so a longer chain is tried again once shorter ones go well.

    Args:
        most: most drafts of a row.
    """

    def __init__(self, most: int) -> None:
        self._tried, self._right = [0.0] * most, [0.0] * most

    def note(self, drafted: int, accepted: int) -> None:
        """Records one row: how many drafts it had, and how many of them were accepted."""
        for position in range(min(drafted, accepted + 1)):
            self._tried[position] += 1
            self._right[position] += position < accepted

    def fade(self) -> None:
        """Lets the rows noted so far count less."""
        self._tried = [tried * _FADE for tried in self._tried]
        self._right = [right * _FADE for right in self._right]

    def forget(self) -> None:
        """Lets the rows noted so far count no more than the guess, since the texts may be others by now."""
        for position, tried in enumerate(self._tried):
            if tried > _DOUBT:
                self._right[position] *= _DOUBT / tried
                self._tried[position] = _DOUBT

    def tokens(self, drafts: int) -> float:
        """Returns the expected tokens of a row in a step with so many drafts, its own one among them."""
        share, reached, tokens = _FIRST_SHARE, 1.0, 1.0
        for tried, right in zip(self._tried[:drafts], self._right[:drafts], strict=True):
            share = (right + _DOUBT * share) / (tried + _DOUBT)
            reached *= share
            tokens += reached
        return tokens


@dataclass(slots=True)
class _SizeClass:
    """What was measured with batches of about one size.

    Attributes:
        plain: (seconds, tokens) of the last steps without drafts.
        drafted: seconds of the last steps by the drafts of their rows.
        credit: seconds that drafts may lose; `None` before enough steps without drafts were measured.
        is_paused: whether there are no drafts, because they do not pay.
        chosen: drafts of a row in the next steps; `None` to choose anew.
        held: steps with the chosen number.
        since_check: steps with drafts since those without were measured.
        rested: steps of the pause.
        was_long: whether the last step with drafts was ignored.
        counts: numbers of drafts that the last step with drafts could have, descending.
    """

    plain: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    drafted: defaultdict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_WINDOW))
    )
    credit: float | None = None
    is_paused: bool = False
    chosen: int | None = None
    held: int = 0
    since_check: int = 0
    rested: int = 0
    was_long: bool = False
    counts: Sequence[int] = ()

    @property
    def is_measured(self) -> bool:
        """Whether the time of steps without drafts is known."""
        return len(self.plain) >= PLAIN_STEPS

    @property
    def may_draft(self) -> bool:
        """Whether the next step may have drafts."""
        return self.is_measured and not self.is_paused

    @property
    def step_seconds(self) -> float:
        """Median time of a step without drafts, which one compilation does not change."""
        return statistics.median([seconds for seconds, _ in self.plain])

    @property
    def token_seconds(self) -> float:
        """Median time of a step without drafts, by the median number of its tokens."""
        return self.step_seconds / max(1, statistics.median([count for _, count in self.plain]))

    def choose(self, counts: Sequence[int], rows: int, acceptance: Acceptance) -> tuple[int, float]:
        """Returns the number of drafts with the most tokens per second, and by what factor it is faster than none.

        A number that was not measured counts as fast as a smaller one, so it is tried if it may be the best.

        Args:
            counts: numbers of drafts to choose from, descending.
            rows: rows of the step.
            acceptance: estimates their tokens.
        """
        plain = seconds = rows * self.token_seconds
        best, most = counts[-1], 0.0
        for drafts in reversed(counts):
            if self.drafted[drafts]:
                seconds = statistics.median(self.drafted[drafts])
            gain = acceptance.tokens(drafts) * plain / max(seconds, _LEAST_SECONDS)
            if gain >= most:
                best, most = drafts, gain
        return best, most

    def check(self) -> None:
        """Has all times measured again."""
        self.since_check = self.held = 0
        self.chosen = None
        self.plain.clear()
        self.drafted.clear()


@dataclass(frozen=True, slots=True)
class _LastStep:
    """The last step that was read: its rows, the tokens they had then, when, and the most drafts of a row."""

    rows: Sequence[int]
    length: int
    read: float
    drafts: int


class Pace:
    """Decides for each step of decode rows alone how many drafts its rows have.

    While a token takes longer with drafts than without, all searches for a gain together lose about `RATE` of the time
    without drafts, and one step more at the beginning.

    Args:
        clock: returns seconds; must be monotonic.
        counts: numbers of drafts of a row to choose from, descending.
        adaptive: False to have as many drafts as possible in every step.

    Attributes:
        pauses: how often drafts have not paid.
    """

    def __init__(
        self, clock: Callable[[], float], counts: Sequence[int], *, adaptive: bool = True
    ) -> None:
        self._clock, self._counts, self._adaptive = clock, counts, adaptive
        self.pauses = 0
        self._acceptance = Acceptance(counts[0])
        self._classes: defaultdict[int, _SizeClass] = defaultdict(_SizeClass)
        self._last: _LastStep | None = None
        self._current = _SizeClass()

    @property
    def is_paused(self) -> bool:
        """Whether drafts have not paid lately, in batches of the last size."""
        return self._current.is_paused

    def choose(self, rows: int, most: int) -> int:
        """Returns how many drafts each row of the next step has; 0 for none.

        Args:
            rows: rows of the step, all of which generate.
            most: most drafts of each of them.
        """
        counts = [count for count in self._counts if count <= most]
        if not (rows and counts):
            return 0
        if not self._adaptive:
            return counts[0]
        measured = self._classes[_class_of(rows)]
        if not measured.may_draft:
            return 0
        measured.counts = counts
        if measured.chosen not in counts:
            measured.chosen, _ = measured.choose(counts, rows, self._acceptance)
            measured.held = 0
        return measured.chosen

    def note(self, drafted: int, accepted: int) -> None:
        """Records one row of a step that was read: how many drafts it had, and how many of them were accepted."""
        self._acceptance.note(drafted, accepted)

    def interrupt(self) -> None:
        """The step that was read has others than decode rows; it is not measured."""
        self._last = None

    def read(self, rows: Sequence[int], length: int, drafts: int) -> None:
        """Measures a step of decode rows that was read, from the moment that the one before was read.

        Args:
            rows: numbers of its requests.
            length: tokens of all of them together, with those of this step.
            drafts: most drafts of a row.
        """
        if not self._adaptive:
            return
        now, last = self._clock(), self._last
        self._last = _LastStep(rows, length, now, drafts)
        self._current = measured = self._classes[_class_of(len(rows))]
        if drafts:
            self._acceptance.fade()
        if last is None or last.rows != rows:
            return
        seconds, tokens = now - last.read, length - last.length
        # While there may be drafts, a step for which none were found is not sent before the last one is read either.
        is_on = measured.may_draft
        if not (drafts or is_on):
            if _add_plain(measured, seconds, tokens):
                self._acceptance.forget()
        elif self._charge(measured, seconds, tokens) and drafts:
            times = measured.drafted[drafts]
            # The first step with another number of drafts may have waited for the host.
            if drafts == last.drafts or not times:
                times.append(seconds)
        if is_on:
            self._choose_anew(measured, len(rows))

    def _choose_anew(self, measured: _SizeClass, rows: int) -> None:
        """Pauses if drafts lose or seem to; else has their number chosen anew from time to time."""
        measured.held += 1
        measured.since_check += 1
        is_due = measured.held >= _STEPS_PER_CHOICE
        if is_due:
            measured.chosen = None
        assert measured.credit is not None, "it is there once steps without drafts are measured"
        if measured.credit <= 0 or (
            is_due
            and measured.choose(measured.counts or self._counts, rows, self._acceptance)[1] < 1
        ):
            measured.is_paused, measured.chosen = True, None
            measured.held = measured.rested = 0
            self.pauses += 1
        if measured.since_check >= _STEPS_PER_CHECK:
            measured.check()

    def _charge(self, measured: _SizeClass, seconds: float, tokens: int) -> bool:
        """Subtracts from the credit what a step took longer than its tokens take without drafts.

        Returns:
            Whether the step was measured.
        """
        if not measured.is_measured or measured.credit is None:
            return False
        step = measured.step_seconds
        is_long = seconds > _LONGEST * step
        was_long, measured.was_long = measured.was_long, is_long
        if is_long and not was_long:
            return False
        gained = measured.credit + tokens * measured.token_seconds - seconds
        measured.credit = min(gained, _MOST_CREDIT * step)
        return True


def _add_plain(measured: _SizeClass, seconds: float, tokens: int) -> bool:
    """Records a step without drafts; its time adds to the credit. Returns whether it ends a pause."""
    measured.plain.append((seconds, tokens))
    if not measured.is_measured:
        return False
    step = measured.step_seconds
    if measured.credit is None:
        measured.credit = _FIRST_CREDIT * step
    if not measured.is_paused:
        return False
    measured.credit += RATE * min(seconds, 2 * step)
    measured.rested += 1
    measured.is_paused = measured.rested < _REST or measured.credit < _FIRST_CREDIT * step
    return not measured.is_paused


def _class_of(rows: int) -> int:
    """Returns the size class of a batch; its steps take about as long as one another."""
    return rows.bit_length()

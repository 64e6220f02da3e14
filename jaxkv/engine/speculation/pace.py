"""`Pace`: measures seconds per token with and without drafts, and so decides when to draft. Imports no JAX.

Drafts gain tokens per step. They lose the overlap of steps with the host, and their steps are a little larger. What
prevails depends on model, machine, batch and text, so it is measured while requests are served.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

WINDOW = 16
"""Steps with drafts after which it is decided whether they pay."""

PLAIN_STEPS = 8
"""Steps without drafts that are measured before the first one with drafts."""

_WINDOWS = 32
"""Windows that paid after which steps without drafts are measured again, since texts and batches change."""

_FIRST_PAUSE, _LONGEST_PAUSE, _FACTOR = 64, 512, 4
"""Steps without drafts after a window that did not pay: the first time, at most, and how fast they become more."""


class Pace:
    """Decides for each step of decode rows alone whether it has drafts.

    Args:
        clock: returns seconds; must be monotonic.
        adaptive: False to have drafts in every step.

    Attributes:
        pauses: how often drafts have not paid.
    """

    def __init__(self, clock: Callable[[], float], *, adaptive: bool = True) -> None:
        self._clock, self._adaptive = clock, adaptive
        self.pauses = self._paid = 0
        self._pause, self._pause_left = _FIRST_PAUSE, 0
        # Per size class of the batch and way, with drafts or without: (seconds, tokens) of the last steps.
        self._samples: defaultdict[tuple[int, bool], deque[tuple[float, int]]] = defaultdict(
            lambda: deque(maxlen=WINDOW)
        )
        # Of the last step: its rows, the sum of their lengths, when it was planned, and whether it had drafts. The step
        # after a change of the way is not measured, because the pipeline fills or drains.
        self._last: tuple[Sequence[int], int, float, bool] | None = None
        self._settled = False

    @property
    def is_paused(self) -> bool:
        """Whether drafts have not paid lately."""
        return self._pause_left > 0

    def may_draft(self, rows: int) -> bool:
        """Whether the next step of so many rows may have drafts."""
        if not self._adaptive:
            return True
        return not self._pause_left and len(self._samples[_class_of(rows), False]) >= PLAIN_STEPS

    def interrupt(self) -> None:
        """The next step is none of decode rows alone; it is not measured."""
        self._last = None

    def next_step(self, rows: Sequence[int], length: int) -> bool:
        """Measures the step before; returns whether the next one has drafts.

        Args:
            rows: numbers of the requests of the next step; each of them generates.
            length: tokens of all of them together.
        """
        if not self._adaptive:
            return True
        now, last = self._clock(), self._last
        if last is not None and last[0] == rows and self._settled:
            self._record(len(rows), now - last[2], length - last[1], drafts=last[3])
        if self._pause_left:
            self._pause_left -= 1
        drafts = self.may_draft(len(rows))
        self._settled = last is not None and last[3] == drafts
        self._last = rows, length, now, drafts
        return drafts

    def _record(self, rows: int, seconds: float, tokens: int, *, drafts: bool) -> None:
        samples = self._samples[_class_of(rows), drafts]
        samples.append((seconds, tokens))
        if not drafts or len(samples) < WINDOW:
            return
        plain = self._samples[_class_of(rows), False]
        if _seconds_per_token(samples) < _seconds_per_token(plain):
            self._pause = _FIRST_PAUSE
            self._paid += 1
            if self._paid % _WINDOWS == 0:
                plain.clear()
        else:
            self.pauses += 1
            self._pause_left = self._pause
            self._pause = min(_FACTOR * self._pause, _LONGEST_PAUSE)
        samples.clear()


def _class_of(rows: int) -> int:
    """Returns the size class of a batch; its steps take about as long as one another."""
    return rows.bit_length()


def _seconds_per_token(samples: Sequence[tuple[float, int]]) -> float:
    """Returns the median time of a step, which one compilation does not change, by the mean number of tokens."""
    seconds = statistics.median([each for each, _ in samples])
    return seconds * len(samples) / max(1, sum([tokens for _, tokens in samples]))

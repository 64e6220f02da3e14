"""A progress bar on stderr: finished samples, and prefill and decode tokens per second."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from tqdm import tqdm

from jaxkv.engine.request_state import FINISHED, RequestState

_SECONDS = 0.2
"""Least time between two updates."""

_HISTORY = 10
"""Number of updates that rates are averaged over."""

_SHARE = 0.01
"""Largest share of the run time that updates may take; with many samples, updates become rarer."""


class Progress:
    """Shows the progress of some samples on stderr. Call it after each step, and `close` it at the end.

    Args:
        samples: the samples to show.
        clock: returns seconds; must be monotonic.
    """

    def __init__(
        self, samples: Sequence[RequestState], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._samples = samples
        self._clock = clock
        self._begun = clock()
        self._due = self._begun + _SECONDS
        self._history: deque[tuple[float, int, int]] = deque([(self._begun, 0, 0)], _HISTORY)
        self._bar = tqdm(total=len(samples), desc="generating", unit="sample", dynamic_ncols=True)

    def __call__(self) -> None:
        """Updates the bar if an update is due."""
        now = self._clock()
        if now < self._due:
            return
        self._show(now, self._history[0])
        self._due = self._clock() + max(_SECONDS, (self._clock() - now) / _SHARE)

    def compiling(self, program: str) -> None:
        """Shows the name of the program that is being compiled; "" ends that."""
        self._bar.set_description(f"compiling {program}" if program else "generating")

    def close(self) -> None:
        """Shows the average rates of the whole run and closes the bar."""
        self._show(self._clock(), (self._begun, 0, 0))
        self._bar.close()

    def _show(self, now: float, since: tuple[float, int, int]) -> None:
        done, prefill, decode = count_tokens(self._samples)
        self._history.append((now, prefill, decode))
        seconds = max(now - since[0], 1e-9)
        # A preempted sample is computed again, so a count can decrease.
        rates = [
            max(0, count - before) / seconds
            for count, before in ((prefill, since[1]), (decode, since[2]))
        ]
        self._bar.n = done
        self._bar.set_postfix_str(f"prefill {rates[0]:,.0f} tok/s, decode {rates[1]:,.0f} tok/s")


def count_tokens(samples: Sequence[RequestState]) -> tuple[int, int, int]:
    """Returns the numbers of finished samples, of computed prompt tokens and of generated tokens."""
    done = prefill = decode = 0
    for sample in samples:
        prompt, generated = len(sample.request.prompt), sample.generated
        done += sample.status == FINISHED
        decode += generated
        if sample.cached is not None:
            prefill += max(
                0,
                (prompt if generated else min(prompt, sample.computed))
                - sample.cached
                - sample.shared,
            )
    return done, prefill, decode

"""A bar for people who wait: samples done, and tokens per second of the last moments. Reads sequences, changes none."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from tqdm import tqdm

from jaxkv.engine.request_state import FINISHED, RequestState

_SECONDS = 0.2
"""Between two looks."""

_LOOKS = 10
"""Rates are taken over so many of them."""

_SHARE = 0.01
"""Of the time, at most, that looking may take: many sequences are looked at less often."""


class Progress:
    """Shows on stderr how far some sequences are. Call it after each step, and `close` it in the end.

    Args:
        samples: what is waited for.
        clock: returns seconds; must not jump.
    """

    def __init__(
        self, samples: Sequence[RequestState], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._samples = samples
        self._clock = clock
        self._begun = clock()
        self._due = self._begun + _SECONDS
        self._looks: deque[tuple[float, int, int]] = deque([(self._begun, 0, 0)], _LOOKS)
        self._bar = tqdm(total=len(samples), desc="generating", unit="sample", dynamic_ncols=True)

    def __call__(self) -> None:
        """Looks, if it is time to."""
        now = self._clock()
        if now < self._due:
            return
        self._show(now, self._looks[0])
        self._due = self._clock() + max(_SECONDS, (self._clock() - now) / _SHARE)

    def compiling(self, program: str) -> None:
        """Shows the name of the program that is being compiled; "" shows that tokens are generated again."""
        self._bar.set_description(f"compiling {program}" if program else "generating")

    def close(self) -> None:
        """Leaves the bar with the rates of the whole time."""
        self._show(self._clock(), (self._begun, 0, 0))
        self._bar.close()

    def _show(self, now: float, since: tuple[float, int, int]) -> None:
        done, prefill, decode = count_tokens(self._samples)
        self._looks.append((now, prefill, decode))
        seconds = max(now - since[0], 1e-9)
        # Whoever gives way is computed again, so that a count can fall.
        rates = [
            max(0, count - before) / seconds
            for count, before in ((prefill, since[1]), (decode, since[2]))
        ]
        self._bar.n = done
        self._bar.set_postfix_str(f"prefill {rates[0]:,.0f} tok/s, decode {rates[1]:,.0f} tok/s")


def count_tokens(samples: Sequence[RequestState]) -> tuple[int, int, int]:
    """Returns how many samples have ended, the prompt tokens computed for them, and the tokens generated."""
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

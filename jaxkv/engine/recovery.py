"""Decides whether a lost cache may be replaced: not on a broken device, and not too often."""

from collections import deque
from collections.abc import Callable

import jax

from jaxkv.errors import CachePoisoned

_FATAL = (
    "ILLEGAL_ADDRESS",
    "illegal memory access",
    "LAUNCH_FAILED",
    "unspecified launch failure",
    "device-side assert",
    "MISALIGNED_ADDRESS",
)


def is_fatal(error: BaseException) -> bool:
    """Whether the error broke the CUDA context, so that this process can compute nothing correct any more."""
    text = f"{error} {error.__cause__ or ''}"
    return any(sign in text for sign in _FATAL)


def is_loss(error: BaseException) -> bool:
    """Whether the engine raised this error because a cache was lost and may not be replaced once more."""
    return isinstance(error, CachePoisoned | jax.errors.JaxRuntimeError)


def refuse_broken(cause: BaseException | None) -> None:
    """Raises `cause`, the error that lost a cache, if it broke the device: a new cache would not help there."""
    if cause is not None and is_fatal(cause):
        raise cause


class RebuildLimit:
    """Limits how often a cache may be rebuilt in a sliding time window.

    Args:
        most: most rebuilds in the window.
        seconds: length of the window.
        clock: returns seconds; must be monotonic.
    """

    def __init__(self, most: int, seconds: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._times: deque[float] = deque()

    def allows(self) -> bool:
        """Returns whether one more rebuild is allowed, and counts it if so."""
        now = self._clock()
        while self._times and self._times[0] <= now - self._seconds:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True

"""When a lost cache may be replaced and when to give up. Knows nothing of what is in it."""

from collections import deque
from collections.abc import Callable

_FATAL = (
    "ILLEGAL_ADDRESS",
    "illegal memory access",
    "LAUNCH_FAILED",
    "unspecified launch failure",
    "device-side assert",
    "MISALIGNED_ADDRESS",
)


def is_fatal(error: BaseException) -> bool:
    """Whether the device's context is broken, so that nothing computed in this process can be trusted any more."""
    told = f"{error} {error.__cause__ or ''}"
    return any(sign in told for sign in _FATAL)


def refuse_broken(cause: BaseException | None) -> None:
    """Raises what cost a cache once more if it broke the device, where no new cache would be of use."""
    if cause is not None and is_fatal(cause):
        raise cause


class RebuildLimit:
    """Allows so many rebuilds in any stretch of time.

    Args:
        most: rebuilds allowed.
        seconds: length of the stretch.
        clock: returns seconds; must not jump.
    """

    def __init__(self, most: int, seconds: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._times: deque[float] = deque()

    def allows(self) -> bool:
        """Counts one more rebuild, if it is allowed."""
        now = self._clock()
        while self._times and self._times[0] <= now - self._seconds:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True

"""Replaces lost caches, but not on a broken device and not too often."""

import logging
from collections import deque
from collections.abc import Callable

import jax

from jaxkv.cache.owner import CacheOwner
from jaxkv.errors import CachePoisoned

_LOG = logging.getLogger(__name__)

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


class CacheRecovery:
    """Replaces the lost caches of one engine, and knows whether the engine has noticed that its cache is a new one.

    Args:
        owner: has the cache; others may lose or replace it too.
        limit: how many lost caches are replaced.

    Attributes:
        count: number of lost caches that were replaced.
    """

    def __init__(self, owner: CacheOwner, limit: RebuildLimit) -> None:
        self.count = 0
        self._owner = owner
        self._limit = limit
        self._noticed = owner.rebuilds

    @property
    def has_new_cache(self) -> bool:
        """Whether the cache was replaced since the last call of `notice`."""
        return self._owner.rebuilds != self._noticed

    def notice(self) -> None:
        """States that the engine has forgotten what older caches held."""
        self._noticed = self._owner.rebuilds

    def replace(self, error: Exception) -> None:
        """Replaces the cache that was lost by an error.

        Raises:
            Exception: the error, if it broke the device or too many caches were lost.
        """
        is_broken = is_fatal(error)
        if is_broken and not self._owner.poisoned:
            self._owner.poison(f"the device is broken: {error}", cause=error)
        if is_broken or not self._limit.allows():
            raise error
        _LOG.warning("the cache was lost and is replaced by an empty one: %r", error)
        self._owner.rebuild()
        self.count += 1

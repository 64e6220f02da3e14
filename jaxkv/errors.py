"""Exceptions of conditions that callers handle separately. Mistakes in arguments raise plain `ValueError`.

`Unsupported` belongs to `pallas_kernels.dispatch`, which raises it.
"""


class OutOfPages(RuntimeError):
    """Too few pages are free; nothing was allocated."""


class OutOfStates(RuntimeError):
    """Too few states are free; nothing was allocated."""


class OutOfMemory(MemoryError):
    """The device or the host has run out of memory; the message names the options to change."""


class CachePoisoned(Exception):
    """The cache's buffers are lost: a step failed after donation, or a handle from before a later step was used.

    It is no `RuntimeError`, so handlers of `STEP_FAILURES` do not catch it and it reaches the engine, which rebuilds
    the cache.
    """


class ReplicaLost(RuntimeError):
    """The process of a replica has ended (`LLM(data_parallel_size=...)`); the message names it."""


class HostLost(Exception):
    """A process of an engine on several hosts has ended, or a call has failed on one; the engine cannot go on.

    It is no `RuntimeError`, so handlers of `STEP_FAILURES` do not catch it.
    """


class CorruptBooks(RuntimeError):
    """The records of the holders of pages and states contradict each other; the message names the ids."""


class CacheLeased(RuntimeError):
    """Another framework holds a lease on the cache's buffers; the message names where. It must end the lease first."""


class UnknownConfig(ValueError):
    """A model directory has a setting that jaxkv does not support and that would change the result."""


class BadCheckpoint(ValueError):
    """A weight or cache file lacks a name, or holds a wrong shape, dtype or layout."""


class ProgramRefused(RuntimeError):
    """A compiled program failed its audit, or strict mode needs a program that was not compiled in the warm-up."""


class BadBundle(ValueError):
    """A bundle of compiled programs is damaged, or was made for something else; the message has the differences."""


STEP_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""Errors of one step, or of one request in it, after which the cache and the process remain usable.

`CachePoisoned` is not one of them.
"""

"""The conditions a caller may want to tell apart. One family each; user mistakes stay `ValueError`.

`Unsupported` belongs to `pallas_kernels.dispatch`, which raises it.
"""


class OutOfPages(RuntimeError):
    """Too few free pages; nothing was consumed."""


class OutOfStates(RuntimeError):
    """Too few free states; nothing was consumed."""


class OutOfMemory(MemoryError):
    """The device or the host has run out of memory; the message names the options to change."""


class CachePoisoned(Exception):
    """The cache's buffers are lost: a step failed after donation, or a handle from before a later step was used.

    No `RuntimeError`, so that code which handles a failed step lets it pass to the one place that rebuilds the cache.
    """


class CorruptBooks(RuntimeError):
    """The records of who holds which page or state contradict each other; the message names the ids."""


class CacheLeased(RuntimeError):
    """Another framework has borrowed the cache's buffers; the message names where. It must give them back first."""


class UnknownConfig(ValueError):
    """A model directory asks for something that would change the result and that is not understood."""


class BadCheckpoint(ValueError):
    """A weight or cache file lacks a name, or holds a wrong shape, dtype or layout."""


class ProgramRefused(RuntimeError):
    """A compiled program failed its audit, or strict mode met a program that was not warmed up."""


STEP_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""Errors of one step, or of one request in it, after which the cache and the process can be used further.

`CachePoisoned` is none of them: it passes to the engine, which rebuilds the cache.
"""

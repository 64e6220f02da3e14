"""The conditions of the bridge that a caller may want to tell apart. `CacheLeased` is the cache owner's, in `jaxkv`."""


class LeaseLeaked(RuntimeError):
    """Someone outside the lease still refers to leased memory, so it cannot be given back or lent."""


class NotZeroCopy(ValueError):
    """A tensor or array cannot cross to the other framework without a copy; the message says why."""

"""Exceptions of the bridge. `CacheLeased` and `CachePoisoned` are defined with the cache owner in `jaxkv`."""


class LeaseLeaked(RuntimeError):
    """A reference to the buffers' memory exists outside of the lease, so they can be neither lent nor returned."""


class NotZeroCopy(ValueError):
    """A tensor or array cannot be shared with the other framework without a copy; the message gives the reason."""

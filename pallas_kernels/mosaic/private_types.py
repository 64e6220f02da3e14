"""Names for types that JAX keeps private; static checkers see them as `Any`."""

from typing import Any

Ref = Any
"""A reference to an array in global or shared memory, to a barrier, or to an accumulator."""

Layout = Any
"""Which thread of a warpgroup holds which number of an array."""

Slice = Any
"""What `pl.ds` returns: neighbouring indices with a start that may be an array."""

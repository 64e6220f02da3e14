"""Names for types that JAX keeps private; static checkers see them as `Any`."""

from typing import Any

Ref = Any
"""A reference to an array in global or shared memory, to a barrier, or to an accumulator."""

Layout = Any
"""A register layout: which thread of a warpgroup holds which element of an array."""

Slice = Any
"""A dynamic slice, as `pl.ds` returns it; its start may be an array."""

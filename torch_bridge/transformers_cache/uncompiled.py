"""`uncompiled`: excludes a function from `torch.compile`, for Python bookkeeping and calls into JAX."""

from collections.abc import Callable
from typing import Any

import torch


def uncompiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function with a graph break around it; under `fullgraph=True` torch raises with the reason."""
    reason = "a JaxkvCache keeps its books in Python; leave fullgraph=True out"
    apart: Any = torch.compiler.disable(function, reason=reason)
    return apart

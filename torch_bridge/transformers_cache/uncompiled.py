"""What `torch.compile` must not look into: our books in Python, and calls into JAX."""

from collections.abc import Callable
from typing import Any

import torch


def uncompiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function as one that runs between two graphs of a compiled forward; `fullgraph=True` says why not."""
    reason = "a JaxkvCache keeps its books in Python; leave fullgraph=True out"
    apart: Any = torch.compiler.disable(function, reason=reason)
    return apart

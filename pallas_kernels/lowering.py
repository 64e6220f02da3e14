"""`quick_lowering`: a context in which JAX 0.11 lowers Mosaic GPU kernels as fast as JAX 0.12 does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

_LOCK = threading.Lock()
_open_blocks: list[Any] = []
"""For each block that some thread is in, JAX's own function."""


@contextmanager
def quick_lowering() -> Iterator[None]:
    """Within the block, JAX 0.11's inference of layouts groups equal variables in the order of their constraints.

    JAX 0.11 sorts them by the text of their operations, and MLIR numbers a whole kernel to print one of them, which
    takes nearly half of the time to lower an attention kernel. JAX 0.12 keeps the order of constraints, as this does.
    The groups are the same, and so is a kernel's code. JAX has its own function again once no thread is in a block.
    """
    if not jax.__version__.startswith("0.11."):
        yield
        return
    # Here, because Mosaic needs a second to load.
    from jax.experimental.mosaic.gpu import constraints

    with _LOCK:
        theirs = _open_blocks[0] if _open_blocks else constraints.compute_transitively_equal_vars
        _open_blocks.append(theirs)
        constraints.compute_transitively_equal_vars = _equal_variables
    try:
        yield
    finally:
        with _LOCK:
            _open_blocks.pop()
            if not _open_blocks:
                constraints.compute_transitively_equal_vars = theirs


def _equal_variables(system: Any) -> dict[Any, list[Any]]:  # noqa: ANN401 - types of Mosaic's
    """Returns for each variable of an equality the others that equalities make equal to it, in a fixed order.

    Args:
        system: Mosaic's `ConstraintSystem`.
    """
    from jax.experimental.mosaic.gpu.constraints import Equals, Variable

    groups: dict[Any, list[Any]] = {}
    for constraint in system.constraints:
        if not isinstance(constraint, Equals):
            continue
        sides = constraint.lhs, constraint.rhs
        if not all(isinstance(side, Variable) for side in sides):
            continue
        one, other = (groups.setdefault(side, [side]) for side in sides)
        if one is not other:
            one += other
            groups.update(dict.fromkeys(other, one))
    return {
        variable: [member for member in group if member != variable]
        for variable, group in groups.items()
    }

"""Checks that frozen configurations share: a bounded number, the name of a dtype."""

import operator
from collections.abc import Callable, Mapping
from numbers import Integral, Real

from jaxkv.wording import shown

INT32_MAX = 2**31 - 1
_DTYPE_ALIASES: Mapping[str, str] = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


def as_int(name: str, value: int, low: int, high: int, why: str = "") -> int:
    """Returns an int in [low, high] as a Python int; NumPy ints are accepted, bools are not.

    The error names `name`, the bounds, the value and, if given, the reason for the bounds (`why`).
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        reason = why and f"; {why}"
        raise ValueError(f"{name} must be an int in [{low}, {high}], got {shown(value)}{reason}")
    return operator.index(value)


def as_float(name: str, value: float, low: float, high: float) -> float:
    """Returns a finite number in [low, high] as a float; a bool is none."""
    # NaN compares as false, and the bounds are finite.
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high:
        raise ValueError(f"{name} must be a finite number in [{low}, {high}], got {shown(value)}")
    return float(value)


def dtype_name(name: str) -> str:
    """Returns the full name of a dtype for a short one such as "bf16"; any other name comes back unchanged."""
    return _DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name


def settle[N](new: object, rule: Callable[[str, N, N, N], N], low: N, high: N, *names: str) -> None:
    """Replaces fields of a new frozen object by what a rule makes of them."""
    for name in names:
        object.__setattr__(new, name, rule(name, getattr(new, name), low, high))

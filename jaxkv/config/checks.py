"""Checks shared by the configurations: bounded numbers and dtype names."""

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
    """Returns `value` as a Python int; NumPy ints are accepted, bools are not.

    Args:
        name: name of the option, for the message.
        value: the given value.
        low: smallest allowed value.
        high: largest allowed value.
        why: reason for the bounds, for the message.

    Raises:
        ValueError: `value` is no int or out of bounds.
    """
    # Nearly every value; asking `Integral` takes several times as long.
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        reason = why and f"; {why}"
        raise ValueError(f"{name} must be an int in [{low}, {high}], got {shown(value)}{reason}")
    return operator.index(value)


def as_float(name: str, value: float, low: float, high: float) -> float:
    """Returns `value` as a Python float; raises `ValueError` for a bool, NaN, or a number out of [low, high]."""
    # Comparisons with NaN are false, and the bounds are finite.
    if type(value) is float and low <= value <= high:
        return value
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high:
        raise ValueError(f"{name} must be a finite number in [{low}, {high}], got {shown(value)}")
    return float(value)


def dtype_name(name: str) -> str:
    """Returns the full name of a dtype for a short one such as "bf16", and any other name unchanged."""
    return _DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name


def check_fields[N](
    new: object, rule: Callable[[str, N, N, N], N], low: N, high: N, *names: str
) -> None:
    """Replaces the named fields of a frozen dataclass under construction by `rule(name, value, low, high)`."""
    for name in names:
        object.__setattr__(new, name, rule(name, getattr(new, name), low, high))

"""`ProcessorCalls`: the logits processors that one request names, each with its arguments."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxkv.config.checks import as_int
from jaxkv.wording import shown

MAX_PROCESSORS = 64
MAX_ARGUMENT_NUMBERS = 2**16
"""Most numbers in one argument."""

MAX_DIMENSIONS = 8


class ProcessorCalls(Mapping[str, Mapping[str, Any]]):
    """A checked and immutable `logits_processors`: name -> argument -> value. It can be hashed, copied and pickled.

    A value is a bool, an int, a float or nested tuples of them; arrays and lists become tuples. Which names and
    arguments there are, and their shapes, is known where the processors are registered.
    """

    def __init__(self, calls: Mapping[str, Mapping[str, Any]]) -> None:
        if not isinstance(calls, Mapping):
            raise ValueError(
                f"logits_processors must map names of registered processors to their arguments, such as "
                f"{{'name': {{'argument': 1}}}}, got {shown(calls)}; functions are registered by "
                f"LLM(logits_processors={{'name': function}})"
            )
        as_int("the number of logits_processors", len(calls), 0, MAX_PROCESSORS)
        self._calls = {_name(name): _arguments(name, given) for name, given in calls.items()}

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return dict(self._calls[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __hash__(self) -> int:
        return hash(frozenset((name, frozenset(self._calls[name].items())) for name in self))

    def __repr__(self) -> str:
        return repr(self._calls)


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"logits_processors must have names as keys, got {shown(name)}")
    return name


def _arguments(name: str, given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(
            f"logits_processors must map {name!r} to its arguments, such as {{}} or {{'argument': 1}}, got "
            f"{shown(given)}"
        )
    return {_name(key): _frozen(name, key, value) for key, value in given.items()}


def _frozen(name: str, key: str, value: object) -> Any:  # noqa: ANN401 - a number or nested tuples
    """Returns a number, or the numbers of an array or of nested lists as nested tuples. It needs no NumPy.

    Raises:
        ValueError: it is neither, or has too many numbers or dimensions.
    """
    try:
        if getattr(value, "size", 0) > MAX_ARGUMENT_NUMBERS:
            raise TypeError("too many numbers")
        made = _tuples(value, MAX_DIMENSIONS)
        if _size(made) > MAX_ARGUMENT_NUMBERS:
            raise TypeError("too many numbers")
    except TypeError:
        raise ValueError(
            f"logits_processors has {shown(value)} as {key!r} of {name!r}; an argument is a number of at most "
            f"64 bits, or an array of at most {MAX_ARGUMENT_NUMBERS} numbers and {MAX_DIMENSIONS} dimensions"
        ) from None
    return made


def _tuples(value: Any, dimensions: int) -> Any:  # noqa: ANN401 - numbers, sequences and arrays of any library
    """Returns numbers as nested tuples of the same lengths; raises `TypeError` for anything else."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise TypeError("more than 64 bits")
    if type(value) in (bool, int, float):
        return value
    as_list = getattr(value, "tolist", None)
    if as_list is not None:
        return _tuples(as_list(), dimensions)
    if not isinstance(value, list | tuple) or dimensions == 0:
        raise TypeError("no number")
    made = tuple(_tuples(item, dimensions - 1) for item in value)
    if len({_shape(item) for item in made}) > 1:
        raise TypeError("several lengths")
    return made


def _shape(value: Any) -> tuple[int, ...]:  # noqa: ANN401 - a number or nested tuples
    if not isinstance(value, tuple):
        return ()
    return (len(value), *_shape(value[0])) if value else (0,)


def _size(value: Any) -> int:  # noqa: ANN401 - a number or nested tuples
    return math.prod(_shape(value))

"""JSON that is read while it arrives: brackets and strings are followed, numbers and words pass as they are."""

import json
import re
from collections.abc import Callable

from jaxkv.serve.parsers.source import Mismatch, Source, Steps

_CLOSING = {"{": "}", "[": "]"}
_PLAIN = re.compile(r'[^"{}\[\]]*')
_IN_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[^\s\"{}\[\],:]*")
_CONTROLS = {code: f"\\u{code:04x}" for code in range(32)} | {
    ord(character): json.dumps(character)[1:-1] for character in "\b\t\n\f\r"
}


def escaped(text: str) -> str:
    """Returns a text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def loads(text: str) -> object:
    """Returns the value of a JSON text.

    Raises:
        Mismatch: it is no JSON, or too deep or too long a number for Python.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Mismatch from None


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def read_value(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    """Reads one value and passes its text on as it arrives.

    Line breaks and other control characters inside strings are escaped, since models write them and JSON forbids them.

    Args:
        source: the text, at the first character of the value.
        emit: gets the pieces of the value.

    Raises:
        Mismatch: brackets do not pair, or the text ends inside the value.
    """
    first = yield from source.peek()
    if first == '"':
        yield from _read_string(source, emit)
    elif first and first in _CLOSING:
        yield from _read_brackets(source, emit)
    else:
        scalar = yield from source.run(_SCALAR)
        if not scalar:
            raise Mismatch
        emit(scalar)


def read_text(source: Source) -> Steps[str]:
    """Reads a string and returns what it stands for.

    Raises:
        Mismatch: no well-formed string follows.
    """
    if (yield from source.peek()) != '"':
        raise Mismatch
    pieces: list[str] = []
    yield from _read_string(source, pieces.append)
    text = loads("".join(pieces))
    assert isinstance(text, str)
    if any("\ud800" <= character <= "\udfff" for character in text):
        # Half of a character, which no UTF-8 can hold.
        raise Mismatch
    return text


def _read_brackets(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    expected: list[str] = []
    while character := (yield from source.peek()):
        if character == '"':
            yield from _read_string(source, emit)
        elif character in "{[":
            expected.append(_CLOSING[character])
            emit((yield from source.one()))
        elif character in "}]":
            if character != expected.pop():
                raise Mismatch
            emit((yield from source.one()))
            if not expected:
                return
        else:
            emit(source.some(_PLAIN))
    raise Mismatch


def _read_string(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    emit((yield from source.one()))
    while character := (yield from source.peek()):
        if character == "\\":
            emit((yield from source.one()))
            emit((yield from source.one()))
        elif character == '"':
            emit((yield from source.one()))
            return
        else:
            emit(source.some(_IN_STRING).translate(_CONTROLS))
    raise Mismatch

"""Python literals that are read while they arrive, and written as JSON."""

import json
import re
import sys
from collections.abc import Callable

from jaxkv.serve.parsers.json_text import escaped
from jaxkv.serve.parsers.source import Mismatch, Source, Steps

type Emit = Callable[[str], None]

_DEEPEST = 64
_SCALAR = re.compile(r"[\w.+-]*")
_IN_STRING = re.compile(r"""[^'"\\\n]*""")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_DIGITS = re.compile(r"[0-9a-fA-F]*")
_ANY = re.compile(".")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_SAME = '\\"bfnrt'
_OTHERS = {"'": "'", "\n": "", "a": "\\u0007", "v": "\\u000b"}
_DIGITS_OF = {"x": 2, "u": 4, "U": 8}


def as_json(text: str) -> str:
    """Returns the JSON of a Python literal.

    Raises:
        Mismatch: the text is none.
    """
    source = Source()
    source.feed(text)
    source.end()
    pieces: list[str] = []
    # All the text is there, so that neither of them waits.
    next(read_literal(source, pieces.append), None)
    next(source.spaces(), None)
    if source.some(_ANY):
        raise Mismatch
    return "".join(pieces)


def read_literal(source: Source, emit: Emit, depth: int = 0) -> Steps[None]:
    """Reads a string, number, list, tuple, dict, True, False or None; the words of JSON are known too.

    Args:
        source: the text, at the first character of the literal.
        emit: gets the pieces of the JSON.
        depth: how many brackets are open.

    Raises:
        Mismatch: something else follows, the text ends, or brackets are nested deeper than 64.
    """
    first = yield from source.peek()
    if first in ("'", '"'):
        yield from read_string(source, emit)
    elif first in _CLOSING and depth < _DEEPEST:
        yield from _read_items(source, emit, depth)
    else:
        text = yield from source.run(_SCALAR)
        written = _scalar(text)
        if written is None:
            # What the end of the answer cuts off is not written.
            emit(text if (yield from source.peek()) else "")
            raise Mismatch
        emit(written)


def read_string(source: Source, emit: Emit) -> Steps[None]:
    """Reads a string between single or double quotes, one or three of them; arguments as for `read_literal`."""
    quote = yield from source.one()
    is_long = yield from source.literal(2 * quote)
    source.skip_cut_off(2 * quote)
    end = (3 if is_long else 1) * quote
    emit('"')
    while not (yield from source.literal(end)):
        source.skip_cut_off(end)
        character = yield from source.one()
        if character == "\\":
            emit((yield from _read_escape(source)))
        else:
            emit(escaped(character + source.some(_IN_STRING)))
    emit('"')


def _read_escape(source: Source) -> Steps[str]:
    """Reads what follows a backslash and returns it as it stands in a JSON string."""
    character = yield from source.one()
    if character in _SAME:
        return f"\\{character}"
    if character in _OTHERS:
        return _OTHERS[character]
    if character in _DIGITS_OF:
        digits = ""
        for _ in range(_DIGITS_OF[character]):
            digits += yield from source.one()
        if _DIGITS.fullmatch(digits) and (code := int(digits, 16)) <= sys.maxunicode:
            return json.dumps(chr(code))[1:-1] if character == "U" else f"\\u{digits:0>4}"
        return escaped(f"\\{character}{digits}")
    # Python keeps the backslash of an escape that it does not know.
    return escaped(f"\\{character}")


def _read_items(source: Source, emit: Emit, depth: int) -> Steps[None]:
    bracket = yield from source.one()
    is_dict = bracket == "{"
    emit("{" if is_dict else "[")
    separator = ""
    while True:
        yield from source.spaces()
        if (yield from source.literal(_CLOSING[bracket])):
            break
        emit(separator)
        separator = ", "
        if is_dict:
            yield from read_string(source, emit)
            yield from source.spaces()
            yield from source.expect(":")
            emit(": ")
            yield from source.spaces()
        yield from read_literal(source, emit, depth + 1)
        yield from source.spaces()
        if not (yield from source.literal(",")):
            yield from source.expect(_CLOSING[bracket])
            break
    emit("}" if is_dict else "]")


def _scalar(text: str) -> str | None:
    """Returns the JSON of a word or number; `None` if it is neither."""
    if text in _WORDS:
        return _WORDS[text]
    digits = text.removeprefix("+")
    return digits if _NUMBER.fullmatch(digits) else None

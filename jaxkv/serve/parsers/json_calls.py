"""Tool calls as JSON objects with a name and arguments, alone, one after another or in a list."""

import re
from dataclasses import dataclass

from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.json_text import loads, read_text, read_value
from jaxkv.serve.parsers.source import Mismatch, Source, Steps
from jaxkv.text.markers import Markers

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
# What may precede name and arguments in a call without a marker; other objects are meant as text.
_OTHER_KEYS = ("type", "id")
# Models close more brackets than they opened.
_CLOSED = re.compile(r"[\s}\]]*")
_SEPARATORS = re.compile(r"[\s,;]*")


@dataclass(frozen=True)
class JsonFormat:
    """Calls such as `{"name": "f", "arguments": {"a": 1}}`, as `ToolFormat` describes a format."""

    begins: tuple[str, ...]
    ends: tuple[str, ...] = ()
    unmarked: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings of the format that may be tokens."""
        return (*self.begins, *self.ends)

    def read(self, calls: Calls, marker: str) -> Steps[None]:
        """Reads the calls behind a marker; see `ToolFormat.read`."""
        source = calls.source
        end = Markers(self.ends) if self.ends else None
        yield from source.spaces()
        if (yield from source.literal("[")):
            yield from source.spaces()
        while True:
            yield from read_json_call(calls, end)
            yield from source.run(_CLOSED)
            source.hold()
            if (yield from source.peek()) not in (",", ";", "{"):
                return
            yield from source.run(_SEPARATORS)


def read_json_call(calls: Calls, end: Markers | None) -> Steps[None]:
    """Reads one object with the name of a function and its arguments, in any order.

    Args:
        calls: what is read, and where the call is written.
        end: what ends malformed arguments; see `Calls.read_arguments`.

    Raises:
        Mismatch: no such object follows.
    """
    source, before = calls.source, calls.begun
    name: str | None = None
    early: str | None = None
    yield from source.expect("{")
    while True:
        key = yield from _read_key(source)
        if key in _NAME_KEYS and name is None:
            name = calls.checked((yield from read_text(source)))
            if early is not None:
                _write(calls, name, early)
        elif key in _ARGUMENT_KEYS and name is not None and calls.begun == before:
            yield from _read_arguments(calls, name, end)
        elif key in _ARGUMENT_KEYS and early is None and name is None:
            early = yield from _read_whole(source)
        elif calls.marked or calls.begun > before or key in _OTHER_KEYS:
            yield from read_value(source, _ignore)
        else:
            raise Mismatch
        yield from source.spaces()
        if not (yield from source.literal(",")):
            break
    yield from source.expect("}")
    if calls.begun == before:
        if name is None or not calls.marked:
            raise Mismatch
        _write(calls, name, "{}")


def _read_key(source: Source) -> Steps[str]:
    yield from source.spaces()
    key = yield from read_text(source)
    yield from source.spaces()
    yield from source.expect(":")
    yield from source.spaces()
    return key


def _read_arguments(calls: Calls, name: str, end: Markers | None) -> Steps[None]:
    if (yield from calls.source.peek()) == "{":
        calls.begin(name)
        yield from calls.read_arguments(end)
    else:
        _write(calls, name, (yield from _read_whole(calls.source)))


def _read_whole(source: Source) -> Steps[str]:
    """Reads arguments at once; also those that are null, or a string with the JSON text of an object."""
    if (yield from source.peek()) == '"':
        text = yield from read_text(source)
    else:
        pieces: list[str] = []
        yield from read_value(source, pieces.append)
        text = "".join(pieces)
    if text.strip() in ("", "null"):
        return "{}"
    if not text.lstrip().startswith("{"):
        raise Mismatch
    loads(text)
    return text


def _write(calls: Calls, name: str, arguments: str) -> None:
    calls.begin(name)
    calls.arguments(arguments)
    calls.source.hold()


def _ignore(text: str) -> None:
    """Takes what a call has beside its name and arguments."""

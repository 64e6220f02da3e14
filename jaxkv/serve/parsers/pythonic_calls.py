"""Tool calls as a Python list of calls with keyword arguments."""

import re
from dataclasses import dataclass

from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.json_calls import JsonFormat
from jaxkv.serve.parsers.object_writer import ObjectWriter
from jaxkv.serve.parsers.python_text import read_literal
from jaxkv.serve.parsers.source import Mismatch, Steps
from jaxkv.text.markers import Markers

_WORD = re.compile(r"[\w.]*")
_BETWEEN = re.compile(r"[\s,\]]*")


@dataclass(frozen=True)
class PythonicFormat:
    """Calls such as `[f(a=1), g(b="x")]`, as `ToolFormat` describes a format. Behind a marker JSON is read too."""

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    unmarked: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings of the format that may be tokens."""
        return (*self.begins, *self.ends)

    def read(self, calls: Calls, marker: str) -> Steps[None]:
        """Reads the calls behind a marker; see `ToolFormat.read`."""
        source = calls.source
        yield from source.spaces()
        if not (yield from source.literal("[")) and not marker:
            raise Mismatch
        yield from source.spaces()
        if (yield from source.peek()) == "{" and marker:
            yield from JsonFormat(self.begins, self.ends).read(calls, marker)
            return
        while True:
            name = calls.checked((yield from source.run(_WORD)))
            yield from source.expect("(")
            arguments = ObjectWriter(calls, name)
            try:
                yield from _read_arguments(calls, arguments)
            except Mismatch:
                yield from calls.read_malformed(Markers(self.ends) if self.ends else None)
            source.hold()
            yield from source.run(_BETWEEN)
            following = yield from source.peek()
            source.hold()
            if not _WORD.fullmatch(following) or not following:
                return


def _read_arguments(calls: Calls, arguments: ObjectWriter) -> Steps[None]:
    source = calls.source
    while True:
        yield from source.spaces()
        if (yield from source.literal(")")):
            break
        key = yield from source.run(_WORD)
        yield from source.spaces()
        if not (yield from source.literal("=")):
            calls.arguments(key if (yield from source.peek()) else "")
            raise Mismatch
        yield from source.spaces()
        yield from read_literal(source, arguments.key(key))
        yield from source.spaces()
        if not (yield from source.literal(",")):
            yield from source.expect(")")
            break
    calls.arguments(arguments.closing)

"""Tool calls as tags: one with the name of the function, and inside it one for each argument."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.object_writer import ObjectWriter
from jaxkv.serve.parsers.source import Mismatch, Source, Steps
from jaxkv.text.markers import Markers

_KEY = re.compile(r'[^<>"\n]*')
# What the schema does not name is a string, as in vLLM.
_STRING = {"type": "string"}


@dataclass(frozen=True)
class TaggedFormat:
    """Calls such as `<function=name><parameter=a>1</parameter></function>`, as `ToolFormat` describes a format.

    Attributes:
        group: markers around one or more calls.
        function: what stands before and behind the name of a function, and the marker at its end.
        parameter: what stands before the name of an argument, and the marker at its end.
        value_begins: what stands behind the name of an argument -> whether its value is a string; `None` if the
            function's schema decides.
        bare: whether calls occur without the group's markers.
        inner: strings inside calls that may be tokens.
    """

    group: tuple[str, str]
    function: tuple[str, str, str]
    parameter: tuple[str, str]
    value_begins: Mapping[str, bool | None]
    bare: bool = False
    inner: tuple[str, ...] = ()
    unmarked: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings of the format that may be tokens."""
        return (*self.group, *self.inner)

    @property
    def begins(self) -> tuple[str, ...]:
        """Markers before calls."""
        return (self.group[0], self.function[0]) if self.bare else (self.group[0],)

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers after calls."""
        return (self.group[1],)

    def read(self, calls: Calls, marker: str) -> Steps[None]:
        """Reads the calls behind a marker; see `ToolFormat.read`."""
        source = calls.source
        before, behind, end = self.function
        if marker != before:
            yield from source.spaces()
            yield from source.expect(before)
        while True:
            name = calls.checked((yield from calls.read_name()))
            yield from source.expect(behind)
            arguments = ObjectWriter(calls, name, _STRING)
            yield from self._read_parameters(calls, arguments)
            yield from source.spaces()
            yield from source.literal(end)
            source.hold()
            yield from source.spaces()
            if not (yield from source.literal(before)):
                return

    def _read_parameters(self, calls: Calls, arguments: ObjectWriter) -> Steps[None]:
        """Reads arguments until something else follows, and ends the object if it is complete."""
        source = calls.source
        before, end = self.parameter
        ends = Markers([f"\n{end}", end])
        while True:
            source.hold()
            yield from source.spaces()
            if not (yield from source.literal(before)):
                break
            key = yield from source.run(_KEY)
            begin = yield from self._read_value_begin(source)
            if begin is None:
                yield from arguments.end(*self.value_begins)
                raise Mismatch
            source.drop()
            yield from source.literal("\n")
            yield from arguments.read_value(key, ends, is_string=self.value_begins[begin])
        yield from arguments.end(before)

    def _read_value_begin(self, source: Source) -> Steps[str | None]:
        for begin in self.value_begins:
            if (yield from source.literal(begin)):
                return begin
        return None


@dataclass(frozen=True)
class KeyValueFormat:
    """Calls of GLM-4.5 and later, `<tool_call>name<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`.

    A string stands as it is and any other value as JSON; the function's schema decides, or the text if it names no
    such argument.
    """

    begins: tuple[str, ...] = ("<tool_call>",)
    ends: tuple[str, ...] = ("</tool_call>",)
    unmarked: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings of the format that may be tokens."""
        return (*self.begins, *self.ends, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def read(self, calls: Calls, marker: str) -> Steps[None]:
        """Reads the call behind a marker; see `ToolFormat.read`."""
        source = calls.source
        yield from source.spaces()
        name = calls.checked((yield from calls.read_name()))
        yield from source.spaces()
        has_arguments = yield from source.literal("<arg_key>")
        if not has_arguments:
            yield from source.expect("</tool_call>")
        arguments = ObjectWriter(calls, name, is_complete=not has_arguments)
        while has_arguments:
            source.hold("<arg_key>")
            key = yield from source.run(_KEY)
            is_whole = yield from source.literal("</arg_key>")
            yield from source.spaces()
            if not is_whole or not (yield from source.literal("<arg_value>")):
                yield from arguments.end("</arg_key>", "<arg_value>")
                raise Mismatch
            source.drop()
            yield from arguments.read_value(key, _VALUE_END)
            source.hold()
            yield from source.spaces()
            has_arguments = yield from source.literal("<arg_key>")
        yield from arguments.end("<arg_key>")


_VALUE_END = Markers(["</arg_value>"])

"""Mistral's tool calls: a name and a JSON object behind a marker, and in older models a list of JSON objects."""

from dataclasses import dataclass

from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.json_calls import JsonFormat
from jaxkv.serve.parsers.source import Mismatch, Steps
from jaxkv.text.markers import Markers

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LIST = JsonFormat((_CALLS,))
_NEXT = Markers([_CALLS])


@dataclass(frozen=True)
class MistralFormat:
    """Calls such as `[TOOL_CALLS]name[ARGS]{"a": 1}`, as `ToolFormat` describes a format.

    `[ARGS]` is missing in texts without special tokens, and an id behind `[CALL_ID]` may precede it.
    """

    begins: tuple[str, ...] = (_CALLS,)
    ends: tuple[str, ...] = ()
    unmarked: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings of the format that may be tokens."""
        return (_CALLS, _ID, _ARGUMENTS)

    def read(self, calls: Calls, marker: str) -> Steps[None]:
        """Reads the calls behind a marker; see `ToolFormat.read`."""
        source = calls.source
        yield from source.spaces()
        if (yield from source.peek()) in ("[", "{"):
            yield from _LIST.read(calls, marker)
            return
        name = yield from calls.read_name()
        if (yield from source.literal(_ID)):
            yield from calls.read_name()
        yield from source.literal(_ARGUMENTS)
        yield from source.spaces()
        if (yield from source.peek()) != "{":
            raise Mismatch
        calls.begin(calls.checked(name))
        yield from calls.read_arguments(_NEXT)

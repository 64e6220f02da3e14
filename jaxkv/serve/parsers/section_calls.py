"""Tool calls as a name and a JSON object between markers of their own, several of them in a section."""

from dataclasses import dataclass

from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.source import Mismatch, Steps
from jaxkv.text.markers import Markers


@dataclass(frozen=True)
class SectionFormat:
    """Calls such as `<begin>name<separator>{"a": 1}<end>`, as `ToolFormat` describes a format.

    DeepSeek's first form has the word "function" in the place of the name, and behind the separator the name and the
    arguments as a block of Markdown. Both forms are read.

    Attributes:
        section: markers around the section.
        call: markers around a call.
        separator: the marker between name and arguments.
    """

    section: tuple[str, str]
    call: tuple[str, str]
    separator: str
    unmarked: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings of the format that may be tokens."""
        return (*self.section, *self.call, self.separator)

    @property
    def begins(self) -> tuple[str, ...]:
        """Markers before calls."""
        return (self.section[0], self.call[0])

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers after calls."""
        return (self.call[1], self.section[1])

    def read(self, calls: Calls, marker: str) -> Steps[None]:
        """Reads one call behind a marker; see `ToolFormat.read`."""
        source = calls.source
        yield from source.spaces()
        if marker == self.section[0]:
            yield from source.expect(self.call[0])
            yield from source.spaces()
        name = yield from calls.read_name()
        yield from source.spaces()
        yield from source.expect(self.separator)
        yield from source.spaces()
        if (yield from source.peek()) != "{":
            name = yield from calls.read_name()
            yield from source.spaces()
            yield from source.literal("```json")
            yield from source.spaces()
        if (yield from source.peek()) != "{":
            raise Mismatch
        calls.begin(calls.checked(name))
        yield from calls.read_arguments(Markers(self.ends))
        yield from source.spaces()
        # In DeepSeek's first form the block of Markdown ends here; in the other nothing is read.
        yield from source.literal("```")

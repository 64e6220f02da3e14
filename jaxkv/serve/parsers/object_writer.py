"""Arguments that a model writes one by one, as pieces of one JSON object."""

from collections.abc import Callable, Mapping

from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.json_text import escaped
from jaxkv.serve.parsers.parameter_types import as_json, is_text
from jaxkv.serve.parsers.source import Steps
from jaxkv.text.markers import Markers


class ObjectWriter:
    """Writes the arguments of one call, which it begins.

    Args:
        calls: where they are written.
        name: the function.
        unknown: the schema of arguments that the function's schema does not name; see `as_json`.
        is_complete: whether the end of the call was read.
    """

    def __init__(
        self,
        calls: Calls,
        name: str,
        unknown: Mapping[str, object] | None = None,
        *,
        is_complete: bool = False,
    ) -> None:
        self._calls = calls
        self._parameters = calls.parameters.get(name, {})
        properties = self._parameters.get("properties")
        self._schemas = properties if isinstance(properties, Mapping) else {}
        self._unknown = unknown
        self._is_complete = is_complete
        self._separator = "{"
        calls.begin(name)

    def key(self, key: str) -> Callable[[str], None]:
        """Writes the name of the next argument and returns what takes the pieces of its JSON."""
        self._calls.arguments(f'{self._separator}"{escaped(key)}": ')
        self._separator = ", "
        return self._calls.arguments

    def read_value(self, key: str, end: Markers, *, is_string: bool | None = None) -> Steps[str]:
        """Reads the text of an argument to a marker, and returns the marker; an empty text at the end of the answer.

        Strings are written as they arrive, other values when they are complete. A value of another type that the end
        of the answer cuts off is not written.

        Args:
            key: the name of the argument.
            end: what ends the value.
            is_string: whether the value is a string; if not given, the function's schema decides.
        """
        write = self.key(key)
        schema = self._schemas.get(key, self._unknown) if is_string is None else None
        source = self._calls.source
        if is_string or is_text(schema, self._parameters):
            write('"')
            marker = yield from source.until(end, lambda text: write(escaped(text)))
            write('"' if marker else "")
            return marker
        pieces: list[str] = []
        marker = yield from source.until(end, pieces.append)
        write(as_json("".join(pieces), schema, self._parameters) if marker else "")
        return marker

    @property
    def closing(self) -> str:
        """The text that ends the object, with its beginning if nothing was written yet."""
        return "{}" if self._separator == "{" else "}"

    def end(self, *expected: str) -> Steps[None]:
        """Ends the object, unless the end of the answer has cut it off.

        Args:
            expected: what could go on with the object; a beginning of it at the end of the answer is read.
        """
        source = self._calls.source
        for text in expected:
            source.skip_cut_off(text)
        if self._is_complete or (yield from source.peek()):
            self._calls.arguments(self.closing)

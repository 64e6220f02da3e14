"""Tool calls that the request demands: the JSON schema that forces them, and the reader of the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.json_calls import JsonFormat
from jaxkv.serve.parsers.source import Mismatch, Steps

type ToolChoice = str | Mapping[str, Any]
"""OpenAI's `tool_choice`: "auto", "none", "required", or `{"type": "function", "function": {"name": ...}}`; the last
also as the name alone."""

_LIST = JsonFormat((), unmarked=True)


def chosen_function(tool_choice: ToolChoice) -> str | None:
    """Returns the name of the one function that a request demands; `None` if it demands none by name."""
    if isinstance(tool_choice, str):
        return None if tool_choice in ("auto", "none", "required") else tool_choice
    function = tool_choice.get("function", tool_choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            'tool_choice is neither "auto", "none" nor "required" and names no function; give '
            '{"type": "function", "function": {"name": ...}}'
        )
    return name


def forced_schema(
    tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice
) -> dict[str, Any] | None:
    """Returns the JSON schema of the answer, behind its reasoning, that a tool choice demands; `None` if it is free.

    A named function gives the schema of its arguments, and "required" that of a list of calls
    `[{"name": ..., "parameters": ...}]`, as in vLLM. A parser opened with the same choice reads these answers.

    Args:
        tools: the request's tools in OpenAI's form.
        tool_choice: the request's choice.

    Raises:
        ValueError: the choice names a function that is none of the tools.
    """
    functions: dict[str, Mapping[str, Any]] = {
        function["name"]: function.get("parameters") or {"type": "object"}
        for tool in tools
        for function in [tool.get("function", tool)]
    }
    name = chosen_function(tool_choice)
    if name is not None:
        if name not in functions:
            raise ValueError(
                f"tool_choice names the function {name!r}, which is none of the request's tools: "
                f"{', '.join(functions)}"
            )
        return dict(functions[name])
    if tool_choice != "required":
        return None
    definitions = {
        key: {
            name: each
            for parameters in functions.values()
            for name, each in parameters.get(key, {}).items()
        }
        for key in ("$defs", "definitions")
        if any(key in parameters for parameters in functions.values())
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function, parameters in functions.items()
    ]
    # References of the parameters' schemas begin at the root.
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **definitions}


@dataclass(frozen=True)
class ForcedFormat:
    """Answers that `forced_schema` describes, as `ToolFormat` describes a format.

    Attributes:
        function: the one function that is demanded; `None` if any may be called.
    """

    function: str | None
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    unmarked: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings of the format that may be tokens."""
        return ()

    def read(self, calls: Calls, marker: str) -> Steps[None]:
        """Reads the calls; see `ToolFormat.read`."""
        yield from calls.source.spaces()
        first = yield from calls.source.peek()
        if self.function is not None and first == "{":
            calls.begin(self.function)
            yield from calls.read_arguments(None)
        elif self.function is None and first == "[":
            yield from _LIST.read(calls, marker)
        else:
            raise Mismatch

"""Tool calls that the request demands: the JSON schema that forces them, and the reader of the answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.json_calls import JsonFormat
from jaxkv.serve.parsers.source import Mismatch, Steps

type ToolChoice = str | Mapping[str, Any]
"""OpenAI's `tool_choice`: "auto", "none", "required", or `{"type": "function", "function": {"name": ...}}`; the last
also as the name alone."""

_CALLS = JsonFormat((), unmarked=True)


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


def read_forced(calls: Calls, function: str | None) -> Steps[None]:
    """Reads an answer that `forced_schema` describes, or nothing if it is none: it may be in the model's own format.

    An object or list of calls with their names is read too where only arguments are demanded; models without a grammar
    write them.

    Args:
        calls: what is read, and where calls are written.
        function: the one function that is demanded; `None` if any may be called.
    """
    source = calls.source
    calls.marked = False
    source.hold()
    try:
        yield from _CALLS.read(calls, "")
    except Mismatch:
        if calls.begun:
            calls.content(source.release())
        else:
            source.restore()
    source.drop()
    if calls.begun or function is None:
        return
    source.hold()
    yield from source.spaces()
    if (yield from source.peek()) == "{":
        calls.begin(function)
        yield from calls.read_arguments(None)
        source.drop()
    else:
        source.restore()

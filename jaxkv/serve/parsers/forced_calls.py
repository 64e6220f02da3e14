"""Tool calls that the request demands: the JSON schema that forces them, and the reader of the answer."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.json_calls import JsonFormat
from jaxkv.serve.parsers.source import Mismatch, Steps

type ToolChoice = str | Mapping[str, Any]
"""OpenAI's `tool_choice`: "auto", "none", "required", or `{"type": "function", "function": {"name": ...}}`; the last
also as the name alone."""

_CALLS = JsonFormat((), unmarked=True)
# Keywords of JSON Schema whose values are data, and those whose values map names to schemas.
_DATA = frozenset({"const", "enum", "default", "examples"})
_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)


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
    `[{"name": ..., "parameters": ...}]`, as in vLLM. A parser opened with the same choice reads these answers. Each
    function's schema keeps its own definitions, which may have the names of another's.

    Args:
        tools: the request's tools in OpenAI's form.
        tool_choice: the request's choice.

    Raises:
        ValueError: the choice names a function that is none of the tools; two tools of a name may be called; or the
            parameters of one are no object.
    """
    offered = [tool.get("function", tool) for tool in tools]
    functions: dict[str, Mapping[str, Any]] = {
        function["name"]: function.get("parameters") or {"type": "object"} for function in offered
    }
    name = chosen_function(tool_choice)
    if name is not None and name not in functions:
        raise ValueError(
            f"tool_choice names the function {name!r}, which is none of the request's tools: "
            f"{', '.join(functions)}"
        )
    if name is None and tool_choice != "required":
        return None
    _check_functions(offered, [*functions] if name is None else [name])
    if name is not None:
        return dict(functions[name])
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function},
                "parameters": {"$ref": f"#/$defs/{number}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, function in enumerate(functions)
    ]
    definitions = {
        str(number): _placed(parameters, f"#/$defs/{number}", f"f{number}.")
        for number, parameters in enumerate(functions.values())
    }
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}


def _check_functions(offered: Sequence[Mapping[str, Any]], demanded: Sequence[str]) -> None:
    """Raises `ValueError` for functions that no call can tell apart, and for arguments that are no object."""
    ids = Counter[str]()
    for name in demanded:
        found = [function for function in offered if function["name"] == name]
        if len(found) > 1:
            raise ValueError(f"{len(found)} tools have the name {name!r}; give each another one")
        parameters = found[0].get("parameters") or {}
        kind = parameters.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise ValueError(
                f'the parameters of the function {name!r} have "type": {json.dumps(kind)}; the arguments of a call '
                'are an object, so give {"type": "object", "properties": ...}'
            )
        ids.update(set(_ids(parameters)))
    if twice := [one for one, count in ids.items() if count > 1]:
        raise ValueError(
            f'schemas of several tools have the "$id" {twice[0]!r}; leave it out or change one'
        )


def _ids(schema: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    """Yields each "$id" of a schema; references behind it begin there."""
    parts = schema if isinstance(schema, list) else []
    if isinstance(schema, Mapping):
        parts = schema.values()
        if isinstance(found := schema.get("$id"), str):
            yield found
    for part in parts:
        yield from _ids(part)


def _placed(schema: Any, root: str, prefix: str, *, named: bool = False) -> Any:  # noqa: ANN401 - JSON
    """Returns a schema whose references to its own root, such as "#/$defs/A", begin at `root` instead.

    A part with an "$id" is its own root and stays as it is.

    Args:
        schema: the schema, or a part of it.
        root: where the whole schema will stand.
        prefix: what its anchors begin with there.
        named: whether `schema` maps names to schemas, as "properties" does, so that its keys are no keywords.
    """
    if isinstance(schema, list):
        return [_placed(part, root, prefix) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    if named:
        return {name: _placed(part, root, prefix) for name, part in schema.items()}
    if isinstance(schema.get("$id"), str):
        return schema
    placed = {}
    for key, value in schema.items():
        match key, value:
            case "$ref", "" | "#":
                placed[key] = root
            case "$ref", str() if value.startswith("#/"):
                placed[key] = root + value[1:]
            case "$ref", str() if value.startswith("#"):
                placed[key] = f"#{prefix}{value[1:]}"
            case "$anchor", str():
                placed[key] = prefix + value
            case _ if key in _DATA:
                placed[key] = value
            case _:
                placed[key] = _placed(value, root, prefix, named=key in _NAMED_SCHEMAS)
    return placed


def read_forced(calls: Calls, function: str | None, *, has_form: bool) -> Steps[None]:
    """Reads an answer that `forced_schema` describes, or nothing if it is none: it may be in the model's own format.

    An object or list of calls with their names is read too where only arguments are demanded; models without a grammar
    write them.

    Args:
        calls: what is read, and where calls are written.
        function: the one function that is demanded; `None` if any may be called.
        has_form: whether a grammar demands the form, so that arguments are never calls with their names.
    """
    if function is None or not has_form:
        yield from _read_named(calls)
    if calls.begun or function is None:
        return
    source = calls.source
    source.hold()
    yield from source.spaces()
    if (yield from source.peek()) == "{":
        calls.begin(function)
        yield from calls.read_arguments(None)
        source.drop()
    else:
        source.restore()


def _read_named(calls: Calls) -> Steps[None]:
    """Reads calls with their names, or nothing."""
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

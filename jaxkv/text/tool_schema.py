"""JSON schema of a Python function that a model may call, as Transformers makes it from type hints and docstring."""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxkv.wording import clip

_BASIC: dict[object, dict[str, object]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
    Any: {},
}
_SECTIONS = re.compile(r"^[ \t]*(Args|Returns|Raises):", re.MULTILINE)
_ARGUMENT = re.compile(r"(?:^|\n)\s*(\w+):\s*(.*?)\s*(?=\n\s*\w+:|\Z)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schema(tool: object) -> dict[str, object]:
    """Returns a tool as a JSON schema: a schema as it is, a function's from its docstring and type hints.

    The docstring is in Google's style and describes each argument; `(choices: ["a", "b"])` at the end of a description
    becomes an `enum`.

    Raises:
        ValueError: the tool is neither a dict nor a function, or lacks a docstring, a description or a usable hint.
    """
    if isinstance(tool, Mapping):
        return dict(tool)
    if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        raise ValueError(
            f"a tool must be a JSON schema (a dict) or a Python function, got {type(tool).__name__}"
        )
    name = tool.__name__
    documentation = inspect.getdoc(tool)
    if not documentation:
        raise ValueError(
            f"the tool {name} has no docstring; describe it and its arguments, or give a schema"
        )
    description, described, returns = _read_docstring(documentation.strip())
    parameters = _parameters(name, tool)
    properties = parameters["properties"]
    returned = properties.pop("return", None)
    if returned is not None and returns is not None:
        returned["description"] = returns
    for argument, schema in properties.items():
        if argument not in described:
            raise ValueError(f"the docstring of the tool {name} has no description of {argument}")
        text = described[argument]
        choices = _CHOICES.search(text)
        if choices:
            schema["enum"] = _choices(name, argument, choices.group(1))
            text = text[: choices.start()].strip()
        schema["description"] = text
    function = {"name": name, "description": description, "parameters": parameters}
    if returned is not None:
        function["return"] = returned
    return {"type": "function", "function": function}


def _read_docstring(text: str) -> tuple[str, dict[str, str], str | None]:
    """Returns the description, the arguments' descriptions and the description of the returned value."""
    parts = _SECTIONS.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    lines = [line for line in sections.get("Args", "").strip().split("\n") if line.strip()]
    described = {
        name: re.sub(r"\s*\n+\s*", " ", words.strip())
        for name, words in _ARGUMENT.findall("\n".join(lines))
    }
    returns = sections.get("Returns")
    return parts[0].strip(), described, None if returns is None else returns.strip()


def _parameters(name: str, tool: Callable[..., object]) -> dict[str, Any]:
    """Returns the schema of a function's arguments; its returned value is the property "return"."""
    signature = inspect.signature(tool)
    bare = inspect.Parameter.empty
    receiver = next(iter(signature.parameters), None)
    if receiver not in ("self", "cls") or signature.parameters[receiver].annotation is not bare:
        receiver = None
    required = []
    for argument, parameter in signature.parameters.items():
        if argument == receiver:
            continue
        if parameter.annotation is bare:
            raise ValueError(f"the argument {argument} of the tool {name} has no type hint")
        if parameter.default is bare:
            required.append(argument)
    properties = {
        argument: _of_hint(name, hint)
        for argument, hint in get_type_hints(tool).items()
        if argument != receiver
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return schema | ({"required": required} if required else {})


def _of_hint(name: str, hint: object) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None:
        return dict(_BASIC.get(hint, {"type": "object"}))
    if origin in (Union, types.UnionType):
        return _of_union(name, inner)
    if origin is Literal:
        return _of_literal(name, inner)
    if origin is list:
        return {"type": "array"} | ({"items": _of_hint(name, inner[0])} if inner else {})
    if origin is tuple and len(inner) != 1 and ... not in inner:
        items = [_of_hint(name, each) for each in inner]
        return {"type": "array"} | ({"prefixItems": items} if items else {})
    if origin is dict:
        values = {"additionalProperties": _of_hint(name, inner[1])} if len(inner) == 2 else {}
        return {"type": "object"} | values
    raise ValueError(
        f"the tool {name} has the type hint {clip(hint)}, which has no JSON schema; give a schema"
    )


def _of_union(name: str, inner: tuple[object, ...]) -> dict[str, Any]:
    made = [_of_hint(name, each) for each in inner if each is not types.NoneType]
    named = [each["type"] for each in made if isinstance(each.get("type"), str)]
    if len(made) == 1:
        schema = made[0]
    elif len(named) == len(made):
        schema = {"type": sorted(map(str, named))}
    else:
        schema = {"anyOf": made}
    return schema | ({"nullable": True} if types.NoneType in inner else {})


def _of_literal(name: str, values: tuple[object, ...]) -> dict[str, Any]:
    allowed = (int, float, str, bool, types.NoneType)
    if not all(type(value) in allowed for value in values):
        raise ValueError(f"a Literal of the tool {name} holds other values than JSON's basic ones")
    kinds = list(dict.fromkeys(str(_BASIC[type(value)]["type"]) for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def _choices(name: str, argument: str, text: str) -> list[object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise ValueError(
            f"the choices of {argument} of the tool {name} are no JSON list: {clip(text, 60)}"
        )
    return [each.strip() if isinstance(each, str) else each for each in found]

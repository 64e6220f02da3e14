"""Values that a model writes as plain text: their JSON, by the type that the function's schema gives them."""

import re
from collections.abc import Iterator, Mapping

from jaxkv.serve.parsers import python_text
from jaxkv.serve.parsers.json_text import escaped, loads
from jaxkv.serve.parsers.source import Mismatch

_OTHER_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
_KINDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_DEEPEST = 8
_OF_PARTS = frozenset({"properties", "patternProperties", "additionalProperties", "items"})
"""Keywords that belong to objects and arrays."""


def is_text(schema: object, root: object = None) -> bool:
    """Returns whether every value of a JSON schema is a string; so it is if the schema gives no type.

    Args:
        schema: the JSON schema.
        root: the schema in which its references begin.
    """
    return _types(schema, root, {}) == {"string"}


def as_json(text: str, schema: object, root: object = None) -> str:
    """Returns the JSON of a value.

    It is the first that fits of: null, a boolean, a number, an object or array, a string.

    Args:
        text: the value as the model wrote it.
        schema: the JSON schema of the value; every type fits if it is no object.
        root: the schema in which its references begin; every type fits what it does not have.
    """
    types = _types(schema, root, {})
    for kind, written in _readings(text.strip()):
        if types is None or kind in types or (kind == "integer" and "number" in types):
            return written
    return f'"{escaped(text)}"'


def _readings(text: str) -> Iterator[tuple[str, str]]:
    """Yields the type other than string that a text can be read as, with its JSON."""
    word = _WORDS.get(text.lower())
    if word is not None:
        yield "null" if word == "null" else "boolean", word
    elif _NUMBER.fullmatch(text) or text[:1] in ("{", "["):
        try:
            yield _KINDS[type(loads(text))], text
        except Mismatch:
            yield from _python_reading(text)


def _python_reading(text: str) -> Iterator[tuple[str, str]]:
    try:
        written = python_text.as_json(text)
        yield _KINDS[type(loads(written))], written
    except Mismatch:
        return


def _types(
    schema: object, root: object, known: dict[str, set[str] | None], depth: int = 0
) -> set[str] | None:
    """Returns the names of the types that a JSON schema allows; `None` if it may be any.

    Args:
        schema: the schema.
        root: the schema in which references begin.
        known: reference -> what was found behind it; `None` while it is looked for, as in a schema that holds itself.
        depth: how many schemas are around this one.
    """
    if not isinstance(schema, Mapping) or depth == _DEEPEST:
        return None
    if "$ref" in schema:
        reference = str(schema["$ref"])
        if reference not in known:
            known[reference] = None
            known[reference] = _types(_target(reference, root), root, known, depth + 1)
        return known[reference]
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    types = {_OTHER_NAMES.get(name, name) for name in names if isinstance(name, str)}
    values = schema.get("enum")
    values = [schema["const"]] if "const" in schema else values
    if not types and isinstance(values, list):
        types = {_KINDS.get(type(value), "string") for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            inner = _types(option, root, known, depth + 1)
            if inner is None:
                return None
            types |= inner
    return types or (None if _OF_PARTS & schema.keys() else {"string"})


def _target(reference: str, root: object) -> object:
    """Returns the schema that a reference such as "#/$defs/A" means; `None` if there is none."""
    found = root if reference[:2] in ("#", "#/") else None
    for name in reference[2:].split("/") if len(reference) > 2 else ():
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found

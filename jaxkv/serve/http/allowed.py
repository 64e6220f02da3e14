"""What the fields of a body allow, in words, made from the same JSON schema as the OpenAPI document."""

from functools import cache
from typing import Any

import msgspec

from jaxkv.wording import listed


@cache
def allowed_of(kind: type) -> dict[str, str]:
    """Returns what each field of a struct allows, such as "an int from 1 to 128", by the field's name."""
    [reference], components = msgspec.json.schema_components([kind])
    schema = components[reference["$ref"].rpartition("/")[2]]
    return {name: _words(field) for name, field in schema["properties"].items()}


def _words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_words(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        values = listed([f'"{value}"' for value in schema["enum"]], most=12)
        return values if len(schema["enum"]) == 1 else f"one of {values}"
    match schema.get("type"):
        case "integer":
            return f"an int{_range(schema, 'minimum', 'maximum')}"
        case "number":
            return f"a number{_range(schema, 'minimum', 'maximum')}"
        case "boolean":
            return "true or false"
        case "string":
            return f"a text{_counts(schema, 'Length', 'characters')}"
        case "array":
            items = f" of {_words(schema['items'])}" if schema.get("items") else ""
            return f"a list{items}{_counts(schema, 'Items', 'entries')}"
    return "an object"


def _range(schema: dict[str, Any], low: str, high: str, unit: str = "") -> str:
    least, most = schema.get(low), schema.get(high)
    if least is not None and most is not None:
        return f" from {least} to {most}{unit}"
    return "" if least is None else f" of at least {least}{unit}"


def _counts(schema: dict[str, Any], what: str, unit: str) -> str:
    if schema.get(f"min{what}") is None and schema.get(f"max{what}") is not None:
        return f" with up to {schema[f'max{what}']} {unit}"
    words = _range(schema, f"min{what}", f"max{what}", f" {unit}")
    return words.replace(" from", " with", 1)

"""Descriptions of the values that the fields of a body allow, made from the schema of the OpenAPI document."""

from functools import cache
from typing import Any

import msgspec

from jaxkv.wording import listed


@cache
def allowed_of(kind: type) -> dict[str, str]:
    """Returns field name -> the values that it allows, such as "an int from 1 to 128"."""
    [reference], components = msgspec.json.schema_components([kind])
    schema = components[reference["$ref"].rpartition("/")[2]]
    return {name: _words(field) for name, field in schema["properties"].items()}


def _words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        given = [_words(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(given))
    if "enum" in schema:
        values = listed([f'"{value}"' for value in schema["enum"]], most=12)
        return f"one of {values}"
    match schema.get("type"):
        case "null":
            return "null"
        case "integer":
            return f"an int{_range(schema)}"
        case "number":
            return f"a number{_range(schema)}"
        case "boolean":
            return "true or false"
        case "string":
            return f"a text{_counts(schema, 'Length', 'characters')}"
        case "array":
            count = _counts(schema, "Items", "entries")
            return (
                f"a list{count}, each {_words(schema['items'])}"
                if schema.get("items")
                else f"a list{count}"
            )
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            count = _counts(schema, "Properties", "entries")
            return f"an object{count}, each {_words(schema['additionalProperties'])}"
    return "an object"


def _range(schema: dict[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if (above := schema.get("exclusiveMinimum")) is not None:
        return f" above {above}, up to {most}"
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return "" if least is None else f" of at least {least}"


def _counts(schema: dict[str, Any], what: str, unit: str) -> str:
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    if most is not None:
        return f" of {least} to {most} {unit}" if least else f" of up to {most} {unit}"
    return f" of at least {least} {unit}" if least else ""

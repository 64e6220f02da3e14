"""The OpenAPI document, made from the table of routes and the structs of their bodies."""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxkv.serve.http.errors import openai_error
from jaxkv.serve.http.operation import Operation
from jaxkv.version import __version__

Json = dict[str, Any]

_REASONS = {
    400: "the request is wrong; `param` names the field",
    401: "the API key is missing or wrong",
    404: "there is no such model",
    413: "the body is too long",
    415: "the body is no JSON",
    429: "too many requests wait; try again later",
    503: "the server takes no requests now; try again later",
    504: "the request took too long",
}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}

_OTHER_ERROR: Json = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
"""Anthropic's form of errors."""


def document(operations: Sequence[Operation], model_name: str) -> Json:
    """Returns the document.

    Args:
        operations: the routes.
        model_name: the only value of a body's `model`.
    """
    bodies = [each.body for each in operations if each.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for body in bodies:
        properties = schemas[body.__name__]["properties"]
        if "model" in properties:
            properties["model"] = {"type": "string", "enum": [model_name]}
    paths: dict[str, Json] = {}
    for each in operations:
        paths.setdefault(_path(each), {})[each.method.lower()] = _operation(each, model_name)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxkv", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR, "OtherError": _OTHER_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _path(operation: Operation) -> str:
    """Returns a path as OpenAPI writes it, without the types of its variables."""
    return operation.path.replace(":path}", "}")


def _operation(operation: Operation, model_name: str) -> Json:
    reply = {operation.content_type: {"schema": dict(operation.reply)}}
    if operation.body is not None and "stream" in operation.body.__struct_fields__:
        # OpenAPI 3.1 has no schema for the events of a stream.
        reply["text/event-stream"] = {}
    found: Json = {
        "operationId": operation.handler.__name__,
        "summary": operation.summary,
        "security": [{"key": []}] if operation.needs_key else [],
        "responses": {
            "200": {"description": "the answer", "content": reply},
            **{str(status): _error(status, operation) for status in operation.errors},
        },
    }
    if "{model" in operation.path:
        found["parameters"] = [
            {
                "name": "model",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
                "example": model_name,
            }
        ]
    if operation.body is not None:
        reference = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    return found


def _error(status: int, operation: Operation) -> Json:
    name = "Error" if operation.error_form is openai_error else "OtherError"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {
        "description": _REASONS[status],
        "content": {"application/json": {"schema": schema}},
    }

"""The OpenAPI document, made from the table of routes and the structs and schemas of their bodies."""

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
    bodies = [each.body for each in operations if isinstance(each.body, type)]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for each in operations:
        if each.body is None:
            continue
        if not isinstance(each.body, type):
            schemas[_body_name(each)] = {**each.body, "properties": dict(each.body["properties"])}
        properties = schemas[_body_name(each)]["properties"]
        if "model" in properties:
            properties["model"] = {"type": "string", "enum": [model_name]}
    paths: dict[str, Json] = {}
    for each in operations:
        body = None if each.body is None else schemas[_body_name(each)]
        paths.setdefault(_path(each), {})[each.method.lower()] = _operation(each, body, model_name)
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


def _body_name(operation: Operation) -> str:
    """Returns the name of a body's schema among the components."""
    if isinstance(operation.body, type):
        return operation.body.__name__
    return "".join(each.capitalize() for each in operation.handler.__name__.split("_")) + "Body"


def _operation(operation: Operation, body: Json | None, model_name: str) -> Json:
    reply = {operation.content_type: {"schema": dict(operation.reply)}}
    if body is not None and "stream" in body["properties"]:
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
    if body is not None:
        reference = {"$ref": f"#/components/schemas/{_body_name(operation)}"}
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

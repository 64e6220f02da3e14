"""Helpers that convert requests of the other APIs to requests of `/v1/chat/completions`."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from jaxkv.serve.api.chat_body import ChatBody
from jaxkv.serve.http.errors import ApiError, bad_request
from jaxkv.wording import clip, listed

Json = dict[str, Any]

_WORD = re.compile(r"[A-Za-z0-9_.:-]{1,40}")
"""Names of types and options. Errors repeat no other text, which may be a conversation's."""


def refused(param: str, message: str) -> ApiError:
    """Returns the error of a field that cannot be served; `param` is its path in the request."""
    return bad_request(message, param)


def kind_of(value: object) -> str:
    """Returns the type of a value of a request for an error message; of numbers and the like the value itself."""
    if isinstance(value, bool | int | float) or value is None:
        return clip(json.dumps(value), 40)
    return {str: "a string", list: "a list"}.get(type(value), "an object")


def word_of(value: object) -> str:
    """Returns the name of a type or an option that a request gives, for an error message."""
    if isinstance(value, str) and _WORD.fullmatch(value):
        return f'"{value}"'
    return kind_of(value)


def typed[T](given: Mapping[str, Any], name: str, kind: type[T], default: T, where: str = "") -> T:
    """Returns a field of a request, or `default` if it is missing or null.

    Args:
        given: the object that has the field.
        name: its name.
        kind: its type; `int` does not take a bool.
        default: its value if it is not given.
        where: path of the object in the request.

    Raises:
        ApiError: it has another type.
    """
    value = given.get(name)
    if value is None:
        return default
    path = f"{where}.{name}" if where else name
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = {str: "a string", int: "an integer", list: "a list", dict: "an object"}
        raise refused(path, f"{path} must be {wanted.get(kind, 'a boolean')}, got {kind_of(value)}")
    return value


def nullable(schema: Mapping[str, Any]) -> Json:
    """Returns the JSON schema of a field that may be null, which counts as not given."""
    return {"anyOf": [dict(schema), {"type": "null"}]}


def closed_object(properties: Mapping[str, Any], *required: str) -> Json:
    """Returns the JSON schema of an object without other fields."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def chat_fields(names: Iterable[str]) -> Json:
    """Returns field -> JSON schema of fields that a chat request has under the same name."""
    _, components = msgspec.json.schema_components([ChatBody])
    fields = components[ChatBody.__name__]["properties"]
    return {name: fields[name] for name in names}


def check_known(given: Mapping[str, Any], known: Iterable[str], where: str = "") -> None:
    """Raises `ApiError` for a field that is not in `known`."""
    names = set(known)
    for name in given:
        if name not in names:
            path = clip(f"{where}.{name}" if where else name, 80)
            raise refused(path, f"{path} is no field that this server knows; leave it out")


def joined_text(
    content: object, kinds: Mapping[str, str], where: str, *, missing: str = "text"
) -> str:
    """Returns the text of a message's content: a string, or a list of parts.

    Args:
        content: what the request has.
        kinds: type of a part -> its field with the text.
        where: path of the content in the request.
        missing: what the content must have, for the message.

    Raises:
        ApiError: a part has another type, such as an image.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, f"{where} must be a string or a list of parts, got {kind_of(content)}")
    pieces = []
    for index, part in enumerate(content):
        path = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in kinds:
            got = word_of(kind) if isinstance(part, Mapping) else kind_of(part)
            wanted = listed(list(kinds))
            raise refused(
                path,
                f"{path} must be a part of type {wanted} ({missing} alone is served), got {got}",
            )
        pieces.append(typed(part, kinds[kind], str, "", path))
    return "".join(pieces)


def each_object(given: Iterable[Any], where: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yields (path, object) for each item of a list.

    Raises:
        ApiError: an item is no object.
    """
    for index, item in enumerate(given):
        path = f"{where}[{index}]"
        if not isinstance(item, Mapping):
            raise refused(path, f"{path} must be an object, got {kind_of(item)}")
        yield path, item


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block, errors of a chat request name the fields of the API that was called.

    Args:
        names: name of a field of `/v1/chat/completions` -> its name in the API that was called.
    """
    try:
        yield
    except ApiError as error:
        raise _renamed(error, names) from error


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    if error.param is None:
        return error
    head = re.split(r"[.[]", error.param)[0]
    theirs = names.get(head, head)
    param = theirs + error.param.removeprefix(head)
    message = error.message.replace(head, theirs)
    # The other APIs have no object "function" inside tools.
    param, message = (text.replace(".function.", ".") for text in (param, message))
    return ApiError(error.status, error.code, message, param, error.headers)

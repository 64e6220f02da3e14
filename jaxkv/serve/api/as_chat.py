"""What requests of the other APIs have in common when they are read as requests of `/v1/chat/completions`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxkv.serve.http.errors import ApiError, bad_request
from jaxkv.wording import listed, shown

Json = dict[str, Any]


def refused(param: str, message: str) -> ApiError:
    """Returns the error of a field that cannot be served; `param` is its path in the request."""
    return bad_request(message, param)


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
        raise refused(path, f"{path} must be {wanted.get(kind, 'a boolean')}, got {shown(value)}")
    return value


def check_known(given: Mapping[str, Any], known: Iterable[str], where: str = "") -> None:
    """Raises `ApiError` for a field that is not in `known`."""
    names = set(known)
    for name in given:
        if name not in names:
            path = f"{where}.{name}" if where else name
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
        raise refused(where, f"{where} must be a string or a list of parts, got {shown(content)}")
    pieces = []
    for index, part in enumerate(content):
        path = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind not in kinds:
            got = shown(kind if isinstance(part, Mapping) else part)
            wanted = listed(list(kinds))
            raise refused(
                path,
                f"{path} must be a part of type {wanted} ({missing} alone is served), got {got}",
            )
        pieces.append(typed(part, kinds[str(kind)], str, "", path))
    return "".join(pieces)


def each_object(given: Iterable[Any], where: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yields (path, object) for each item of a list.

    Raises:
        ApiError: an item is no object.
    """
    for index, item in enumerate(given):
        path = f"{where}[{index}]"
        if not isinstance(item, Mapping):
            raise refused(path, f"{path} must be an object, got {shown(item)}")
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
    theirs = names.get(head)
    if theirs is None:
        return error
    param = theirs + error.param.removeprefix(head)
    message = error.message.replace(head, theirs)
    return ApiError(error.status, error.code, message, param, error.headers)

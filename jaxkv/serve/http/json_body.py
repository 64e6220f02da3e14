"""Reads the JSON of a request strictly: what two readers might understand differently is refused."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

import msgspec

from jaxkv.serve.http.allowed import allowed_of
from jaxkv.serve.http.errors import ApiError, bad_request
from jaxkv.wording import clip

MOST_DIGITS = 100
"""Longest number, in characters."""

_SAFE_INT = 2**63
_FEW_CONTAINERS = 1000
_LONG_NUMBER = re.compile(rf"[0-9]{{{MOST_DIGITS + 1}}}")
_AT = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*)`$")


def parse_json(body: bytes, depth: int) -> dict[str, Any]:
    """Returns the JSON object of a body.

    Args:
        body: the bytes, in UTF-8.
        depth: deepest nesting.

    Raises:
        ApiError: 400 for what is no JSON object, for a key given twice, NaN and infinities, numbers of more than
            `MOST_DIGITS` digits, lone surrogates, NUL characters, and nesting deeper than `depth`.
    """
    tree = _plain_tree(body, depth)
    return _careful_tree(body, depth) if tree is None else tree


def _plain_tree(body: bytes, depth: int) -> dict[str, Any] | None:
    """Returns the JSON object of a body that needs no care, which is nearly every one; `None` for others.

    msgspec and this check take a third of the time of `json` with its hooks. Only keys given twice, long integers and
    deep nesting are to be found here: msgspec refuses the rest. Without escapes of characters, each key has one colon,
    and each other colon is one of a text; so there are as many as the object's keys and texts have, unless a key came
    twice.
    """
    if b"\\u" in body:
        return None
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if type(tree) is not dict:
        return None
    colons, level = 0, [tree]
    for _ in range(depth):
        inner = []
        for outer in level:
            values: Sequence[Any] = outer if type(outer) is list else list(outer.values())
            if type(outer) is dict:
                colons += len(outer) + sum(key.count(":") for key in outer)
            kinds = set(map(type, values))
            if int in kinds and not all(_is_safe(value) for value in _ends(values, kinds)):
                return None
            if str in kinds:
                colons += sum(value.count(":") for value in values if type(value) is str)
            if dict in kinds or list in kinds:
                inner += [value for value in values if type(value) is dict or type(value) is list]
        if len(inner) > _FEW_CONTAINERS:
            return None  # The other way is the faster one for these.
        if not inner:
            return tree if colons == body.count(b":") else None
        level = inner
    return None


def _ends(values: Sequence[Any], kinds: set[type]) -> Sequence[Any]:
    """Returns the least and the greatest of integers alone, which decide for all; otherwise all values."""
    return (min(values), max(values)) if kinds == {int} else values


def _is_safe(value: object) -> bool:
    return type(value) is not int or -_SAFE_INT <= value < _SAFE_INT


def _careful_tree(body: bytes, depth: int) -> dict[str, Any]:
    """Returns what `parse_json` does, or raises its errors, for any body."""
    try:
        text = body.decode()
        tree = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_int if _LONG_NUMBER.search(text) else None,
            parse_float=_float,
            parse_constant=_constant,
        )
    except UnicodeDecodeError:
        raise _no_json("it is not in UTF-8") from None
    except RecursionError:
        raise _no_json(f"it is nested deeper than {depth} levels") from None
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} at character {error.pos}") from None
    if not isinstance(tree, dict):
        raise _no_json("it is no object")
    _check_depth(tree, depth)
    if "\\u" in text:
        _check_characters(tree)
    return tree


def convert[S](tree: Mapping[str, Any], kind: type[S]) -> S:
    """Returns a JSON object as a struct; every type is strict.

    Raises:
        ApiError: 400 that names the field, what was wanted and, of a number, what was got.
    """
    try:
        return msgspec.convert(tree, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), tree, kind) from None


def _wrong_field(text: str, tree: Mapping[str, Any], kind: type) -> ApiError:
    """Returns the error for what msgspec says of a body."""
    at = _AT.search(text)
    path = at.group(1).replace("[...]", "") if at else ""
    reason = text[: at.start()] if at else text
    if unknown := _UNKNOWN.match(reason):
        name = clip(unknown.group(1), 60)
        return bad_request(
            f"the field {_join(path, name)} is unknown; {_instead(name, kind, path)}",
            _join(path, name),
            "unknown_field",
        )
    if missing := _MISSING.match(reason):
        name = _join(path, missing.group(1))
        return bad_request(f"the field {name} is missing", name, "missing_field")
    got = tree.get(path)
    shown = f", got {clip(json.dumps(got), 40)}" if isinstance(got, int | float) else ""
    name = re.split(r"[.[]", path, maxsplit=1)[0]
    allowed, inner = allowed_of(kind), path.removeprefix(name)
    if name in allowed and (not inner or (allowed[name] != "an object" and "." not in inner)):
        return bad_request(f"{name} must be {allowed[name]}{shown}", name)
    if reason.startswith("Invalid"):
        # It quotes the value.
        return bad_request(f"{path} has a value that is not supported", path)
    reason = reason.replace("`", "").replace("Expected", "wanted")
    return bad_request(f"{path or 'the body'} is wrong: {reason}", path or None)


def _instead(name: str, kind: type, path: str) -> str:
    """Returns what to do with an unknown field."""
    known = () if path else getattr(kind, "__struct_fields__", ())
    closest = get_close_matches(name, known, n=1, cutoff=0.75)
    return f"the closest is {closest[0]}" if closest else "remove it"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _no_json(why: str) -> ApiError:
    return bad_request(f"the body is no valid JSON object: {why}", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise bad_request("the body has a key twice in one object; keep one", code="invalid_json")
    return found


def _int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise _no_json(f"a number has more than {MOST_DIGITS} digits")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _no_json("a number is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise _no_json(f"it has the number {name}")


def _check_depth(tree: object, depth: int) -> None:
    level = [tree]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _no_json(f"it is nested deeper than {depth} levels")


def _check_characters(tree: object) -> None:
    """Raises for a NUL or a lone surrogate in any text or key."""
    left = [tree]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str) and (
            "\0" in value or any("\ud800" <= each <= "\udfff" for each in value)
        ):
            raise _no_json("a text has a NUL or a lone surrogate, which is no valid Unicode")

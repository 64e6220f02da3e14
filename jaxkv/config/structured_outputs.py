"""`StructuredOutputs`: the grammar that the generated text of one request must follow."""

import json as json_format
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxkv.config.checks import as_int
from jaxkv.config.reasoning_tokens import ReasoningTokens
from jaxkv.wording import clip, shown

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 100
MAX_CHOICES = 4096
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the generated text must be. Exactly one attribute beside `reasoning` is set; the names are vLLM's.

    A request ends with the reason "stop" as soon as its text can only end. Before that, the model's end ids can be
    sampled only where the text is complete.

    Attributes:
        json: a JSON schema, as a dict or as text; kept as text. Between two tokens of JSON there are at most 64
            whitespace characters. A keyword that would be ignored is an error.
        json_object: `True` for any JSON object.
        regex: a regular expression that matches the whole text, without look-around and back-references.
        choice: up to 4096 texts, of which one is generated.
        grammar: a grammar in the Lark dialect of llguidance, with a rule `start`.
        reasoning: what marks the free text before the structured output; `None` if there is none.

    Raises:
        ValueError: none or several attributes are set, one has the wrong type, or it is larger than 256 KiB, or a
            schema is no JSON object or is nested deeper than 100 levels.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    reasoning: ReasoningTokens | None = None

    def __post_init__(self) -> None:
        """Checks the attribute that is set, and replaces it by an immutable form."""
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in _NAMES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs needs exactly one of {', '.join(_NAMES)}, got {' and '.join(given) or 'none'}"
            )
        [name] = given
        value = getattr(self, name)
        if name == "json":
            object.__setattr__(self, "json", _schema_text(value))
        elif name == "choice":
            object.__setattr__(self, "choice", _choices(value))
        elif name == "json_object":
            if value is not True:
                raise ValueError(f"json_object must be True, got {shown(value)}")
        else:
            _check_text(name, value)
        if not isinstance(self.reasoning, ReasoningTokens | None):
            raise ValueError(f"reasoning must be ReasoningTokens(...), got {shown(self.reasoning)}")

    @property
    def kind(self) -> str:
        """Name of the attribute that is set, one of the forms."""
        return next(name for name in _NAMES if getattr(self, name) is not None)


_NAMES = tuple(field.name for field in fields(StructuredOutputs) if field.name != "reasoning")


def _check_text(name: str, value: object) -> None:
    """Raises `ValueError` unless `value` is a non-empty text of at most `MAX_GRAMMAR_BYTES` in UTF-8."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty text, got {shown(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds a lone surrogate at index {error.start}; remove it"
        ) from None
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(
            f"{name} has {size:,} bytes, at most {MAX_GRAMMAR_BYTES:,} are allowed; make it smaller"
        )


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"choice must be a sequence of texts, got {shown(value)}")
    choices = tuple(value)
    as_int("the number of choices", len(choices), 1, MAX_CHOICES)
    for one in choices:
        _check_text("choice", one)
    _check_text("choice", "".join(choices))
    return choices


def _schema_text(schema: object) -> str:
    """Returns a JSON schema as normalised text.

    Raises:
        ValueError: it is no JSON object, too long or nested too deep.
    """
    if not isinstance(schema, str | Mapping):
        raise ValueError(f"json must be a JSON schema, as a dict or as text, got {shown(schema)}")
    try:
        text = schema if isinstance(schema, str) else _dump(schema)
        _check_text("json", text)
        _check_depth(text)
        tree = json_format.loads(text)
        if not isinstance(tree, dict):
            raise ValueError("it is no JSON object")
        text = _dump(tree)
    except (TypeError, RecursionError) as error:
        raise ValueError(
            f"json must be a JSON schema of at most {MAX_SCHEMA_DEPTH} levels: {clip(error)}"
        ) from None
    except ValueError as error:
        known = str(error).startswith("json ")
        raise ValueError(
            str(error) if known else f"json must be a JSON schema: {clip(error)}"
        ) from None
    _check_text("json", text)
    return text


def _dump(schema: object) -> str:
    return json_format.dumps(
        dict(schema) if isinstance(schema, Mapping) else schema,
        ensure_ascii=False,
        allow_nan=False,
        separators=(",", ":"),
    )


def _check_depth(text: str) -> None:
    """Raises `ValueError` if arrays and objects are nested too deep; malformed text is left to the parser."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(
                f"json is nested deeper than {MAX_SCHEMA_DEPTH} levels; make the schema flatter, for example with $ref"
            )

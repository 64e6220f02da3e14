"""The fields with which a request demands a form of its text."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxkv.config.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_BYTES, StructuredOutputs
from jaxkv.serve.http.errors import bad_request
from jaxkv.wording import clip

_Grammar = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
_Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Free text."""


class JsonObjectFormat(
    msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True
):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A schema, as OpenAI nests it."""

    name: Annotated[str, Meta(max_length=256)]
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(
    msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    """JSON of a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class Outputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's form of the same; one of its fields is given."""

    json: dict[str, Any] | _Grammar | None = None
    json_object: bool | None = None
    regex: _Grammar | None = None
    choice: _Choices | None = None
    grammar: _Grammar | None = None


class StructuredFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The fields of a body."""

    response_format: ResponseFormat | None = None
    structured_outputs: Outputs | None = None
    guided_json: dict[str, Any] | _Grammar | None = None
    guided_regex: _Grammar | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Grammar | None = None

    def demanded(self) -> StructuredOutputs | None:
        """Returns what the text must be; `None` if it is free.

        Raises:
            ApiError: 400 for several demands, or one that can never be met.
        """
        found = self._demands()
        if not found:
            return None
        if len(found) > 1:
            raise bad_request(f"{' and '.join(found)} are one option; give one of them", min(found))
        [(name, demand)] = found.items()
        try:
            return StructuredOutputs(**demand)
        except ValueError as error:
            raise bad_request(clip(error, 300), name) from error

    @property
    def demanding(self) -> str:
        """The field that demands a form; empty if the text is free."""
        return next(iter(self._demands()), "")

    def _demands(self) -> dict[str, dict[str, Any]]:
        """Returns field -> arguments of `StructuredOutputs`, of the fields that demand a form."""
        return {
            name: demand
            for name in StructuredFields.__struct_fields__
            if (value := getattr(self, name)) is not None
            and (demand := _demand(name, value)) is not None
        }


def _demand(name: str, value: Any) -> dict[str, Any] | None:  # noqa: ANN401 - any field
    """Returns the arguments of `StructuredOutputs` for one field; `None` if it demands nothing."""
    match value:
        case TextFormat():
            return None
        case JsonObjectFormat():
            return {"json_object": True}
        case JsonSchemaFormat(json_schema=schema):
            if schema.schema is None:
                raise bad_request("response_format.json_schema.schema is missing", name)
            return {"json": schema.schema}
        case Outputs():
            return {
                each: given
                for each in Outputs.__struct_fields__
                if (given := getattr(value, each)) is not None
            }
    return {name.removeprefix("guided_"): value}

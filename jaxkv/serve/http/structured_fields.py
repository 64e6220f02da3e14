"""The fields with which a request demands a form of its text."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxkv.serve.http.errors import ApiError

_Grammar = Annotated[str, Meta(min_length=1, max_length=256 * 2**10)]
_Choices = Annotated[list[str], Meta(min_length=1, max_length=4096)]


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

    def check_free(self) -> None:
        """Raises `ApiError` if a form of the text is demanded, which the engine cannot do."""
        for name in StructuredFields.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not isinstance(value, TextFormat):
                raise ApiError(
                    400, "unsupported_field", f"{name} is not supported by this server", name
                )

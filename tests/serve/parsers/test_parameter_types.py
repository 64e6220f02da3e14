"""The JSON of values that a model writes as plain text."""

import pytest

from jaxkv.serve.parsers.parameter_types import as_json, is_text


@pytest.mark.parametrize(
    ("text", "schema", "written"),
    [
        ("3", {"type": "integer"}, "3"),
        ("3", {"type": "number"}, "3"),
        ("3.5", {"type": "number"}, "3.5"),
        ("3.5", {"type": "integer"}, '"3.5"'),
        ("007", {"type": "integer"}, '"007"'),
        ("3", {"type": "string"}, '"3"'),
        (" True ", {"type": "boolean"}, "true"),
        ("yes", {"type": "boolean"}, '"yes"'),
        ("None", {"type": ["string", "null"]}, "null"),
        ("None", {"type": "string"}, '"None"'),
        ('{"a": [1]}', {"type": "object"}, '{"a": [1]}'),
        ("{'a': (True, None)}", {"type": "dict"}, '{"a": [true, null]}'),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("[1]", {"type": "object"}, '"[1]"'),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3"),
        ("x\n", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, '"x\\n"'),
        ("2", {"enum": [1, 2]}, "2"),
        ("2", {"enum": ["1", "2"]}, '"2"'),
        ("[1]", {"$ref": "#/$defs/A"}, "[1]"),
        ("[1]", None, "[1]"),
        ("NaN", None, '"NaN"'),
        ("[NaN]", {"type": "array"}, '"[NaN]"'),
        ("9" * 5000, {"type": "integer"}, '"' + "9" * 5000 + '"'),
        ("[" * 5000 + "]" * 5000, {"type": "array"}, '"' + "[" * 5000 + "]" * 5000 + '"'),
    ],
)
def test_a_value_has_the_type_of_its_schema_or_is_a_string(text, schema, written):
    assert as_json(text, schema) == written


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "str"}, {}, {"enum": ["a"]}])
def test_a_schema_of_strings_is_known(schema):
    assert is_text(schema)


@pytest.mark.parametrize(
    "schema", [None, {"type": ["string", "null"]}, {"type": "integer"}, {"$ref": "#"}]
)
def test_other_schemas_are_no_text(schema):
    assert not is_text(schema)

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
        ("2", {"const": 2}, "2"),
        ("2", {"const": "2"}, '"2"'),
        ("2", {"allOf": [{"type": "integer"}, {"minimum": 1}]}, "2"),
        ("2", {"type": "string", "allOf": [{"maxLength": 1}]}, '"2"'),
        ('{"a": 1}', {"properties": {"a": {"type": "integer"}}}, '{"a": 1}'),
        ("[1]", {"items": {"type": "integer"}}, "[1]"),
        ("[1]", None, "[1]"),
        ("NaN", None, '"NaN"'),
        ("[NaN]", {"type": "array"}, '"[NaN]"'),
        ("9" * 5000, {"type": "integer"}, '"' + "9" * 5000 + '"'),
        ("[" * 5000 + "]" * 5000, {"type": "array"}, '"' + "[" * 5000 + "]" * 5000 + '"'),
    ],
)
def test_a_value_has_the_type_of_its_schema_or_is_a_string(text, schema, written):
    assert as_json(text, schema) == written


DEFINED = {
    "$defs": {
        "size": {"enum": ["1", "2"]},
        "place": {"type": "object"},
        "a/b": {"type": "integer"},
        "self": {"anyOf": [{"$ref": "#/$defs/self"}, {"type": "null"}]},
        "many": {"anyOf": [{"$ref": "#/$defs/many"}] * 40},
    }
}


@pytest.mark.parametrize(
    ("text", "schema", "written"),
    [
        ("1", {"$ref": "#/$defs/size"}, '"1"'),
        ("1", {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}, '"1"'),
        ("null", {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}, "null"),
        ("{}", {"allOf": [{"$ref": "#/$defs/place"}]}, "{}"),
        ("1", {"$ref": "#/$defs/a~1b"}, "1"),
        ("1", {"$ref": "#/$defs/self"}, "1"),
        ("1", {"$ref": "#/$defs/many"}, "1"),
        ("1", {"$ref": "#/$defs/none"}, "1"),
        ("1", {"$ref": "https://example.org"}, "1"),
    ],
)
def test_a_reference_means_the_schema_of_its_function(text, schema, written):
    assert as_json(text, schema, DEFINED) == written


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "str"}, {}, {"enum": ["a"]}])
def test_a_schema_of_strings_is_known(schema):
    assert is_text(schema)


@pytest.mark.parametrize(
    "schema", [None, {"type": ["string", "null"]}, {"type": "integer"}, {"$ref": "#"}]
)
def test_other_schemas_are_no_text(schema):
    assert not is_text(schema)

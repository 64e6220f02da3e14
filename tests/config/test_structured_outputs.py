"""`StructuredOutputs`: exactly one field, checked early, immutable, and small."""

import json
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from jaxkv import SamplingParams, StructuredOutputs
from jaxkv.config.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_SCHEMA_DEPTH

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


def nested(levels):
    return '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)


def test_a_schema_as_a_dict_and_as_text_are_equal_and_hash_alike():
    one, other = (
        StructuredOutputs(json=SCHEMA),
        StructuredOutputs(json=json.dumps(SCHEMA, indent=4)),
    )
    assert one == other
    assert hash(one) == hash(other)
    assert (
        len({SamplingParams(structured_outputs=one), SamplingParams(structured_outputs=other)}) == 1
    )


def test_later_changes_of_a_schema_do_not_reach_the_request():
    schema = {"type": "object", "properties": {}}
    outputs = StructuredOutputs(json=schema)
    schema["properties"]["more"] = {}
    assert "more" not in outputs.json
    with pytest.raises(FrozenInstanceError):
        outputs.json = "{}"
    assert pickle.loads(pickle.dumps(outputs)) == outputs


def test_the_order_of_properties_is_kept():
    outputs = StructuredOutputs(json={"properties": {"z": {}, "a": {}}})
    assert list(json.loads(outputs.json)["properties"]) == ["z", "a"]


def test_kind_is_the_field_that_is_set():
    assert StructuredOutputs(json_object=True, regex=None).kind == "json_object"
    assert StructuredOutputs(regex="a", json_object=False).kind == "regex"
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"json": "{}", "regex": "a"}, "got json and regex"),
        ({"json_object": False}, "got none"),
        ({"json_object": 1}, "json_object must be True, got 1"),
        ({"json": 3}, "as a dict or as text, got 3"),
        ({"json": "[]"}, "it is no JSON object"),
        ({"json": "{"}, "must be a JSON schema: Expecting"),
        ({"json": {"a": object()}}, "must be a JSON schema"),
        ({"json": {"maximum": float("nan")}}, "must be a JSON schema"),
        ({"json": '{"maximum":' + "9" * 5000 + "}"}, "must be a JSON schema"),
        ({"json": '{"maximum":1e400}'}, "must be a JSON schema"),
        ({"json": nested(MAX_SCHEMA_DEPTH + 1)}, "deeper than 100 levels"),
        ({"json": nested(200_000 // 6)}, "deeper than 100 levels"),
        ({"json": {"enum": ["x" * 2**20]}}, "at most 262,144 are allowed"),
        ({"json": '{"enum":["' + "x" * 2**20 + '"]}'}, "at most 262,144 are allowed"),
        ({"json": "{}\ud800"}, "lone surrogate"),
        ({"regex": ""}, "non-empty text"),
        ({"regex": b"a"}, "non-empty text, got b'a'"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "has 262,145 bytes"),
        ({"grammar": "\ud800"}, "lone surrogate at index 0"),
        ({"choice": "yes"}, "a sequence of texts, got 'yes'"),
        ({"choice": []}, r"in \[1, 4096\], got 0"),
        ({"choice": ["a", ""]}, "non-empty text, got ''"),
        ({"choice": ["a", 1]}, "non-empty text, got 1"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, r"got 4097"),
        ({"choice": ["a" * 200_000, "b" * 200_000]}, "has 400,000 bytes"),
    ],
    ids=lambda given: given[:30] if isinstance(given, str) else "+".join(given),
)
def test_a_mistake_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**fields)


def test_a_dict_that_contains_itself_or_is_nested_without_end_is_refused():
    loop = {}
    loop["properties"] = loop
    with pytest.raises(ValueError, match="json must be a JSON schema"):
        StructuredOutputs(json=loop)
    deep = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="100 levels"):
        StructuredOutputs(json=deep)


def test_brackets_in_strings_are_no_levels():
    assert StructuredOutputs(json={"const": "[{" * 200 + '"'})
    assert StructuredOutputs(json=nested(MAX_SCHEMA_DEPTH))


def test_sampling_params_take_structured_outputs_only():
    with pytest.raises(ValueError, match=r"must be StructuredOutputs\(json=...\)"):
        SamplingParams(structured_outputs={"json": "{}"})
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    assert replace(params, max_tokens=3).structured_outputs is params.structured_outputs

"""Answers to requests that demand a tool call."""

import pytest

from jaxkv.serve.parsers.events import Content, Reasoning
from jaxkv.serve.parsers.forced_calls import forced_schema
from tests.serve.parsers.examples import PARIS, TOOLS, call, opened, parsed

NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    "choice", [NAMED, {"type": "function", "name": "get_weather"}, "get_weather"]
)
def test_the_arguments_of_a_named_function_are_its_call(choice):
    parser = opened("hermes", "qwen3", tool_choice=choice)
    assert parsed(parser, f"<think>Hm.</think>\n{PARIS}") == [
        Reasoning("Hm."),
        *call(0, "get_weather", PARIS),
    ]


def test_a_list_of_calls_is_read_if_a_call_is_required():
    text = f'[{{"name": "get_weather", "parameters": {PARIS}}}, {{"name": "get_time", "parameters": {{}}}}]'
    events = [*call(0, "get_weather", PARIS), *call(1, "get_time", "{}")]
    for tools in ("hermes", "llama3_json", "llama4_pythonic", None):
        assert parsed(opened(tools, tool_choice="required"), text) == events
    assert parsed(opened("hermes"), text) == [Content(text)]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_demanded_call_may_have_the_models_own_format(choice):
    text = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    assert parsed(opened("hermes", tool_choice=choice), text) == call(0, "get_weather", PARIS)


@pytest.mark.parametrize("tools", ["hermes", "llama3_json", "llama4_pythonic"])
def test_a_call_with_its_name_is_read_where_arguments_are_demanded(tools):
    text = f'{{"name": "get_weather", "parameters": {PARIS}}}'
    assert parsed(opened(tools, tool_choice=NAMED), text) == call(0, "get_weather", PARIS)


@pytest.mark.parametrize(
    "written", ['{"name": "Ann"}', '{"type": {"name": "get_time"}, "a": 1}', "{}"]
)
def test_arguments_that_look_like_the_beginning_of_a_call_are_arguments(written):
    events = parsed(opened("llama3_json", tool_choice="get_time"), f"\n{written}\n")
    assert events == call(0, "get_time", written)


def test_arguments_of_a_grammar_may_look_like_a_call_with_its_name():
    tools = [*TOOLS, function("register", {"type": "object"})]
    written = f'{{"name": "get_weather", "parameters": {PARIS}}}'
    options = {"request_tools": tools, "tool_choice": "register"}
    events = parsed(opened("hermes", has_form=True, **options), written)
    assert events == call(0, "register", written)
    assert parsed(opened("hermes", **options), written) == call(0, "get_weather", PARIS)


def test_a_demanded_call_in_python_is_read():
    text = '[get_weather(city="Paris")]'
    for choice in ("required", NAMED):
        events = parsed(opened("llama4_pythonic", tool_choice=choice), text)
        assert events == call(0, "get_weather", PARIS)


def test_an_answer_without_the_demanded_call_is_content():
    for choice in ("required", NAMED):
        for text in ("No [tool] fits.", " [1] No.", "[", "\n"):
            assert parsed(opened("hermes", tool_choice=choice), text) == [Content(text)]


def test_text_behind_a_demanded_call_is_content():
    text = f'[{{"name": "get_weather", "parameters": {PARIS}}}] Done.'
    events = parsed(opened("hermes", tool_choice="required"), text)
    assert events == [*call(0, "get_weather", PARIS), Content("Done.")]


def test_the_schema_of_a_named_function_is_that_of_its_arguments():
    assert forced_schema(TOOLS, NAMED) == TOOLS[0]["function"]["parameters"]
    assert forced_schema(TOOLS, "get_time") == {"type": "object"}


def test_the_schema_of_a_required_call_is_a_list_with_every_function():
    schema = forced_schema(TOOLS, "required")
    assert schema is not None
    assert schema["minItems"] == 1
    names = [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]]
    assert names == ["get_weather", "get_time"]


def function(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_each_function_keeps_its_own_definitions():
    """Two of a name were one: the last function's."""
    tools = [
        function(
            name,
            {"$defs": {"Item": {"type": kind}}, "properties": {"x": {"$ref": "#/$defs/Item"}}},
        )
        for name, kind in (("pay", "integer"), ("say", "string"))
    ]
    schema = forced_schema(tools, "required")
    for number, kind in enumerate(("integer", "string")):
        call = schema["items"]["anyOf"][number]
        assert call["properties"]["parameters"] == {"$ref": f"#/$defs/{number}"}
        placed = schema["$defs"][str(number)]
        assert placed["properties"]["x"] == {"$ref": f"#/$defs/{number}/$defs/Item"}
        assert placed["$defs"] == {"Item": {"type": kind}}


def test_references_of_a_function_begin_at_its_own_root():
    """Not those to other documents or behind an "$id", and not what is data or a name."""
    own = {"$id": "https://example.org/f", "$defs": {"A": {}}, "$ref": "#/$defs/A"}
    parameters = {
        "type": "object",
        "properties": {
            "kids": {"type": "array", "items": {"$ref": "#"}},
            "again": {"anyOf": [{"$ref": "#/properties/kids"}, {"type": "null"}]},
            "else": {"$ref": "https://example.org/schema#/a"},
            "$ref": {"const": {"$ref": "#"}},
            "const": {"$ref": ""},
            "own": own,
            "anchor": {"$anchor": "a", "items": {"$ref": "#a"}},
        },
        "default": {"$ref": "#/properties"},
    }
    placed = forced_schema([function("f", parameters)], "required")["$defs"]["0"]
    properties = placed["properties"]
    assert properties["kids"]["items"] == {"$ref": "#/$defs/0"}
    assert properties["again"]["anyOf"][0] == {"$ref": "#/$defs/0/properties/kids"}
    assert properties["else"] == parameters["properties"]["else"]
    assert properties["$ref"] == {"const": {"$ref": "#"}}
    assert properties["const"] == {"$ref": "#/$defs/0"}
    assert placed["default"] == parameters["default"]
    assert properties["own"] == own
    assert properties["anchor"] == {"$anchor": "f0.a", "items": {"$ref": "#f0.a"}}
    whole = {"type": "object", **own}
    assert forced_schema([function("f", whole)], "required")["$defs"]["0"] == whole
    with pytest.raises(ValueError, match=r'several tools have the "\$id" .*example.org/f'):
        forced_schema([function("f", whole), function("g", parameters)], "required")


@pytest.mark.parametrize("definitions", [None, [1], "x"])
def test_definitions_that_are_none_are_left_to_the_grammar(definitions):
    parameters = {"type": "object", "$defs": definitions}
    schema = forced_schema([function("f", parameters)], "required")
    assert schema["$defs"]["0"] == parameters


def test_what_no_call_can_tell_apart_or_hold_is_refused():
    tools = [function("f", {"type": "object"}), function("f", {}), function("g", None)]
    for choice in ("required", "f"):
        with pytest.raises(ValueError, match="2 tools have the name 'f'"):
            forced_schema(tools, choice)
    assert forced_schema(tools, "g") == {"type": "object"}
    assert forced_schema(tools, "auto") is None
    for choice in ("required", "f"):
        for kind in ("string", ["string", "null"]):
            with pytest.raises(
                ValueError, match=r"'f' have \"type\": .*\"string\".* are an object"
            ):
                forced_schema([function("f", {"type": kind})], choice)
    assert forced_schema([function("f", {"type": ["object", "null"]})], "f")


def test_a_free_choice_has_no_schema():
    assert forced_schema(TOOLS, "auto") is None
    assert forced_schema(TOOLS, "none") is None


def test_a_function_that_is_no_tool_is_refused():
    with pytest.raises(ValueError, match="none of the request's tools: get_weather, get_time"):
        forced_schema(TOOLS, "get_news")


def test_a_choice_of_another_form_is_refused():
    for choice in ({}, {"type": "function", "function": {"name": 3}}, {"function": "f"}):
        with pytest.raises(ValueError, match="names no function"):
            opened("hermes", tool_choice=choice)

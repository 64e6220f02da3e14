"""Answers that are nearly tool calls, and what becomes of them."""

# ruff: noqa: RUF001 - DeepSeek's markers have wide bars.

import pytest

from jaxkv.serve.parsers.events import Content, Reasoning, ToolCallArguments, ToolCallBegin
from tests.serve.parsers.examples import PARIS, arguments, call, opened, parsed


def hermes(body, after=""):
    return parsed(opened("hermes"), f"<tool_call>{body}</tool_call>{after}")


@pytest.mark.parametrize(
    "body",
    [
        "get_weather",
        "{",
        "{}",
        '{"name"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "two words", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "get_time", "arguments": 3}',
        '{"name": "get_time", "arguments": [1]}',
        '{"name": "get_time", "arguments": "soon"}',
        '{"name": "get_time", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"name": "get_time", "arguments": "{\\"a\\": NaN}"}',
        '{"arguments": {"a": ], "name": "get_time"}',
        '{"name": "get_time" "arguments": {}}',
        '{"name": "\\x", "arguments": {}}',
    ],
)
def test_malformed_json_is_content_as_it_is(body):
    assert hermes(body) == [Content(f"<tool_call>{body}</tool_call>")]


def test_a_call_behind_a_malformed_one_is_found():
    text = f'<tool_call>{{"name": <tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    assert parsed(opened("hermes"), text) == [
        Content('<tool_call>{"name":'),
        *call(0, "get_weather", PARIS),
    ]


def test_malformed_arguments_are_passed_on_up_to_the_end_marker():
    body = '{"name": "get_time", "arguments": {"a": [1}, 2}}'
    assert hermes(body, "Done.") == [
        ToolCallBegin(0, "get_time"),
        ToolCallArguments(0, '{"a": [1}, 2}}'),
        Content("Done."),
    ]


def test_text_inside_the_markers_behind_a_call_is_content():
    assert hermes('{"name": "get_time", "arguments": {}} and more', " Done.") == [
        *call(0, "get_time", "{}"),
        Content("and more Done."),
    ]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "get_time"}',
        '{"name": "get_time", "arguments": null}',
        '{"name": "get_time", "arguments": ""}',
        '{"type": "function", "id": [1], "name": "get_time", "parameters": {}, "index": {"a": "b"}}',
        ' [ {"name" : "get_time" , "arguments" : {} } ] ',
    ],
)
def test_a_call_without_arguments_has_an_empty_object(body):
    assert hermes(body) == call(0, "get_time", "{}")


@pytest.mark.parametrize("cut", ["<", "<para", "<parameter=ci"])
def test_an_object_stays_open_where_max_tokens_cut_off_the_next_argument(cut):
    text = f"<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n{cut}"
    assert parsed(opened("qwen3_coder"), text) == call(0, "get_weather", '{"city": "Paris"')


def test_what_max_tokens_cut_off_behind_the_arguments_is_no_text():
    text = '[TOOL_CALLS] [{"name": "get_time", "arguments": {}, "id": "a1B'
    assert parsed(opened("mistral"), text) == call(0, "get_time", "{}")


def test_a_line_break_inside_a_string_is_escaped():
    events = hermes('{"name": "get_time", "arguments": {"a": "1\n\t2\x01"}}')
    assert arguments(events) == [{"a": "1\n\t2\x01"}]


def test_an_unknown_function_is_called_behind_a_marker_and_is_text_without_one():
    body = '{"name": "get_news", "parameters": {}}'
    assert hermes(body) == call(0, "get_news", "{}")
    assert parsed(opened("llama3_json"), body) == [Content(body)]
    assert parsed(opened("llama3_json"), f"<|python_tag|>{body}") == call(0, "get_news", "{}")
    assert parsed(opened("llama4_pythonic"), "[get_news()]") == [Content("[get_news()]")]


def test_text_behind_a_separator_is_content():
    text = '[{"name": "get_time", "parameters": {}}], and more'
    assert parsed(opened("llama3_json"), text) == [
        *call(0, "get_time", "{}"),
        Content(", and more"),
    ]


def test_text_behind_a_list_in_python_is_content():
    text = "[get_time()] and then"
    assert parsed(opened("llama4_pythonic"), text) == [
        *call(0, "get_time", "{}"),
        Content("and then"),
    ]


def test_an_object_without_arguments_is_text_without_a_marker():
    for text in (
        '{"name": "get_time"}',
        '{"a": 1, "name": "get_time", "parameters": {}}',
        '{"a": "',
    ):
        assert parsed(opened("llama3_json"), text) == [Content(text)]


def test_an_object_that_is_no_call_is_emitted_before_it_ends():
    parser = opened("llama3_json")
    assert parser.push('{"a": [1, 2') == [Content('{"a": [1, 2')]


def test_an_end_marker_without_a_call_is_content():
    text = "A </tool_call> ends it."
    assert parsed(opened("hermes"), text) == [Content(text)]


def test_names_lose_the_prefix_and_number_of_their_format():
    assert hermes('{"name": "functions.get_time:0"}') == call(0, "get_time", "{}")


@pytest.mark.parametrize("tools", ["qwen3_coder", "glm45"])
def test_an_argument_has_the_type_that_its_reference_means(tools):
    size, place = {"enum": ["1", "2"]}, {"type": "object"}
    schema = {
        "properties": {"size": {"$ref": "#/$defs/size"}, "at": {"allOf": [{"$ref": "#/$defs/at"}]}},
        "$defs": {"size": size, "at": place},
    }
    text = {
        "qwen3_coder": "<tool_call><function=f><parameter=size>1</parameter><parameter=at>{}</parameter></function>",
        "glm45": "<tool_call>f<arg_key>size</arg_key><arg_value>1</arg_value>"
        "<arg_key>at</arg_key><arg_value>{}</arg_value></tool_call>",
    }[tools]
    given = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert arguments(parsed(opened(tools, request_tools=given), text)) == [{"size": "1", "at": {}}]


def test_flat_tools_have_types_too():
    tools = [
        {"type": "function", "name": "f", "parameters": {"properties": {"a": {"type": "number"}}}}
    ]
    text = "<function=f>\n<parameter=a>\n1e3\n</parameter>\n</function>"
    assert arguments(parsed(opened("qwen3_coder", request_tools=tools), text)) == [{"a": 1000.0}]


def test_malformed_tags_end_the_call():
    text = '<function=get_weather>\n<parameter=city>x</parameter>\n<parameter="a>1</parameter></function>'
    assert parsed(opened("qwen3_coder"), text) == [
        *call(0, "get_weather", '{"city": "x"}'),
        Content('<parameter="a>1</parameter></function>'),
    ]


def test_pairs_without_a_value_end_the_call():
    text = "<tool_call>get_time<arg_key>a</arg_key>b</tool_call>"
    assert parsed(opened("glm45"), text) == [
        *call(0, "get_time", "{}"),
        Content("<arg_key>a</arg_key>b"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\nnow<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>get_time<｜tool▁call▁end｜>",
    ],
)
def test_a_section_without_a_call_is_content(text):
    assert parsed(opened("deepseek_v3"), text) == [Content(text)]


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ('"""a\n"b" c"""', 'a\n"b" c'),
        ("'''it''s\\n'''", "it''s\n"),
        ('"""a\\"""b"""', 'a"""b'),
        ('""""""', ""),
        ("''", ""),
        (r"'\U0001F600\a\v'", "\U0001f600\a\v"),
        (r"'\U00110000'", r"\U00110000"),
        (r"'\U0000D83D'", "\ud83d"),
    ],
)
def test_strings_of_python_are_read_in_all_pieces(literal, value):
    text = f"[get_weather(city={literal}, days=2), get_time()]"
    whole = parsed(opened("llama4_pythonic"), text)
    assert arguments(whole) == [{"city": value, "days": 2}, {}]
    assert parsed(opened("llama4_pythonic"), *text) == whole
    written = "".join(event.text for event in whole if isinstance(event, ToolCallArguments))
    for length in range(len("[get_weather("), len(text)):
        cut = parsed(opened("llama4_pythonic"), *text[:length])
        parts = [event.text for event in cut if isinstance(event, ToolCallArguments)]
        assert written.startswith("".join(parts))


def test_python_expressions_are_passed_on_as_they_are():
    events = parsed(opened("llama4_pythonic"), "[get_time(a=1 + 2, b=3)]")
    assert events == [ToolCallBegin(0, "get_time"), ToolCallArguments(0, '{"a": 1+ 2, b=3)]')]


def test_deep_lists_and_texts_without_end_raise_nothing():
    deep = "[" * 4_000
    for tools in ("hermes", "llama4_pythonic", "qwen3_coder", "glm45"):
        for text in (
            f'<tool_call>{{"name": "get_time", "arguments": {{"a": {deep}',
            f'<tool_call>{{"arguments": {{"a": {deep}{"]" * 4_000}}}, "name": "get_time"}}',
            f"[get_time(a={deep})]",
            f"<tool_call><function=get_weather><parameter=where>{deep}</parameter>",
            f"<tool_call>get_weather<arg_key>where</arg_key><arg_value>{deep}</arg_value>",
        ):
            assert parsed(opened(tools), text)


def test_special_tokens_are_no_text_unless_they_belong_to_a_format():
    special = ("<tool_call>", "</tool_call>", "<|im_end|>", "<|endoftext|>")
    text = 'A<|im_end|>B<tool_call>{"name": "get_time"}</tool_call><|im_end|><|endof'
    assert parsed(opened("hermes", special=special), text) == [
        Content("AB"),
        *call(0, "get_time", "{}"),
        Content("<|endof"),
    ]
    # Where no marker is special, the tokenizer has removed the tokens; what looks like one is text.
    assert parsed(opened("hermes", special=special[2:]), "A<|im_end|>") == [Content("A<|im_end|>")]


@pytest.mark.parametrize("reasoning", [None, "hunyuan_a13b"])
def test_names_of_special_tokens_inside_structured_output_are_text(reasoning):
    special = ("<tool_call>", "<|im_end|>", "<answer>")
    form = '{"a": "<|im_end|><answer><tool_call>"}'
    thought = "<think>Why<|im_end|>?</think>" if reasoning else ""
    for choice in ("auto", "get_time"):
        wanted = [Content(form)] if choice == "auto" else call(0, "get_time", form)
        for end in ("", "<|im_end|>"):
            parser = opened("hermes", reasoning, special=special, tool_choice=choice, has_form=True)
            events = parsed(parser, *thought, *form, *end)
            assert events == [*[Reasoning("Why?")][: len(thought)], *wanted]


@pytest.mark.parametrize("end", ["", "<|return|>", "<|endoftext|>"])
def test_names_of_special_tokens_inside_structured_output_of_harmony_are_text(end):
    special = ("<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|endoftext|>")
    form = '{"a": "<|endoftext|><|end|>"}'
    text = f"<|channel|>analysis<|message|>Why<|endoftext|>?<|end|><|channel|>final<|message|>{form}{end}"
    parser = opened("openai", "openai_gptoss", special=special, has_form=True)
    assert parsed(parser, *text) == [Reasoning("Why?"), Content(form)]


def test_a_harmony_answer_in_another_form_is_content():
    for text in ("Hello to you.", "<|message|>Hello to you.<|return|>", "Hello to you.<|return|>"):
        parser = opened("openai", "openai_gptoss", "<|start|>assistant")
        assert parsed(parser, text) == [Content("Hello to you.")]


def test_a_harmony_message_that_the_prompt_began_goes_on():
    prompt = "<|end|><|start|>assistant<|channel|>analysis<|message|>So"
    assert parsed(opened("openai", "openai_gptoss", prompt), " it is.<|end|>") == [
        Reasoning(" it is.")
    ]


def test_harmony_without_tools_or_reasoning_is_content():
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|message|>{}<|call|>"
    assert parsed(opened("openai", None, request_tools=None), text) == [Content("Hm.{}")]


def test_a_harmony_message_to_a_built_in_tool_is_reasoning():
    text = "<|channel|>commentary to=python<|message|>print(1)<|call|>"
    assert parsed(opened("openai", "openai_gptoss"), text) == [Reasoning("print(1)")]


def test_a_harmony_header_that_max_tokens_cut_off_is_no_text():
    for text in ("<|channel|>anal", "<|channel|>final<|message|>A<|end|><|start|>assis"):
        events = parsed(opened("openai", "openai_gptoss", "<|start|>assistant"), text)
        assert events == ([Content("A")] if "A" in text else [])

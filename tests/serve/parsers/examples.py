"""Answers as models of each family write them, with the events that they stand for."""

# ruff: noqa: RUF001 - DeepSeek's markers have wide bars.

import json
from dataclasses import dataclass, replace

from jaxkv.serve.parsers.choose import choose_parsers, open_parser
from jaxkv.serve.parsers.events import Content, Reasoning, ToolCallArguments, ToolCallBegin

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "where": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
PARIS = '{"city": "Paris"}'
# Marks of the format, of JSON and of other formats inside a string, escapes, and a nested object.
HARD = r'{"city": "<\/x> } ] </tool_call> \" \\ Z\u00fcrich 東京 😀", "where": {"at": [[1.5e3, -2], {}]}}'


def call(index, name, arguments):
    return [ToolCallBegin(index, name), ToolCallArguments(index, arguments)]


@dataclass(frozen=True)
class Example:
    """An answer, its parsers and its events."""

    name: str
    tools: str | None
    reasoning: str | None
    text: str
    events: list
    prompt_end: str = ""
    special: tuple = ()

    def opened(self, **options):
        return opened(self.tools, self.reasoning, self.prompt_end, self.special, **options)


def opened(tools, reasoning=None, prompt_end="", special=(), request_tools=TOOLS, **options):
    """Returns the parser of an answer to a request with tools."""
    choice = choose_parsers(None, special, "", tools=tools or "none", reasoning=reasoning or "none")
    options = {"thinking": None, **options}
    return open_parser(choice, tools=request_tools, prompt_end=prompt_end, **options)


def joined(events):
    """Returns events with neighbours of one kind joined."""
    whole = []
    for event in events:
        last = whole.pop() if whole and type(whole[-1]) is type(event) else None
        if last is None or isinstance(event, ToolCallBegin):
            whole += [event] if last is None else [last, event]
        else:
            whole.append(replace(event, text=last.text + event.text))
            assert replace(whole[-1], text="") == replace(last, text="")
    return whole


def parsed(parser, *pieces):
    """Returns the joined events of an answer in pieces."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def arguments(events):
    """Returns the arguments of all calls, as values."""
    return [json.loads(event.text) for event in events if isinstance(event, ToolCallArguments)]


_HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
_XML = "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>"
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_TWO = [*call(0, "get_weather", PARIS), *call(1, "get_time", "{}")]
_START = "<|start|>assistant"
_HARMONY = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)

EXAMPLES = [
    Example("plain", "hermes", "qwen3", "Hello <there>.\n", [Content("Hello <there>.\n")]),
    Example(
        "hermes_reasoning",
        "hermes",
        "qwen3",
        "<think>\nWeather. Use <tool_call>?\n</think>\n\nLet me look.\n"
        + _HERMES.format("get_weather", PARIS),
        [
            Reasoning("Weather. Use <tool_call>?"),
            Content("Let me look."),
            *call(0, "get_weather", PARIS),
        ],
    ),
    Example(
        "hermes_parallel",
        "hermes",
        None,
        _HERMES.format("get_weather", PARIS) + "\n" + _HERMES.format("get_time", "{}"),
        _TWO,
    ),
    Example(
        "hermes_hard",
        "hermes",
        None,
        _HERMES.format("get_weather", HARD) + "\nDone.",
        [*call(0, "get_weather", HARD), Content("Done.")],
    ),
    Example(
        "hermes_2_pro_order",
        "hermes",
        None,
        f'<tool_call>\n{{"arguments": {HARD}, "name": "get_weather"}}\n</tool_call>',
        call(0, "get_weather", HARD),
    ),
    Example(
        "hermes_arguments_as_text",
        "hermes",
        None,
        _HERMES.format("get_weather", json.dumps(PARIS)),
        call(0, "get_weather", PARIS),
    ),
    Example(
        "hermes_brace_too_many",
        "hermes",
        None,
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}}}\n</tool_call>',
        call(0, "get_weather", PARIS),
    ),
    Example(
        "qwen3_coder",
        "qwen3_coder",
        "qwen3",
        "Both.\n\n"
        + _XML.format(
            '<parameter=city>\nParis,\n"\\ <b>&amp;</b>\n</parameter>\n'
            "<parameter=days>\n3\n</parameter>\n"
            "<parameter=exact>\nTrue\n</parameter>\n"
            '<parameter=where>\n{"at": [1, null]}\n</parameter>\n'
        )
        + "\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        [
            Content("Both."),
            *call(
                0,
                "get_weather",
                '{"city": "Paris,\\n\\"\\\\ <b>&amp;</b>", "days": 3, "exact": true, '
                '"where": {"at": [1, null]}}',
            ),
            *call(1, "get_time", "{}"),
        ],
    ),
    Example(
        "qwen3_coder_without_group",
        "qwen3_coder",
        None,
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        call(0, "get_weather", PARIS),
    ),
    Example(
        "seed_oss",
        "seed_oss",
        "seed_oss",
        "<seed:think>\nHm.</seed:think><seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Paris</parameter>\n</function>\n<function=get_time>\n</function>\n"
        "</seed:tool_call>",
        [Reasoning("Hm."), *_TWO],
    ),
    Example(
        "llama3",
        "llama3_json",
        None,
        f'{{"name": "get_weather", "parameters": {HARD}}}; {{"name": "get_time", "parameters": {{}}}}',
        [*call(0, "get_weather", HARD), *call(1, "get_time", "{}")],
    ),
    Example(
        "llama3_tag",
        "llama3_json",
        None,
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}<|eom_id|>',
        call(0, "get_weather", PARIS),
        special=("<|python_tag|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    Example(
        "llama3_json_as_text",
        "llama3_json",
        None,
        '{"name": "Paris", "parameters": {"people": 2}}',
        [Content('{"name": "Paris", "parameters": {"people": 2}}')],
    ),
    Example(
        "pythonic",
        "llama4_pythonic",
        None,
        "[get_weather(city='Par\\'is\\n\"', days=-3, exact=True, where={'at': [1.5, None, ()]}), "
        "get_time()]",
        [
            *call(
                0,
                "get_weather",
                '{"city": "Par\'is\\n\\"", "days": -3, "exact": true, "where": {"at": [1.5, null, []]}}',
            ),
            *call(1, "get_time", "{}"),
        ],
    ),
    Example(
        "lfm2",
        "lfm2",
        None,
        '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Looking it up.<|im_end|>',
        [*call(0, "get_weather", PARIS), Content("Looking it up.")],
        special=("<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>"),
    ),
    Example(
        "olmo3",
        "olmo3",
        None,
        'Sure.\n<function_calls>get_weather(city="Paris")\nget_time()</function_calls>',
        [Content("Sure."), *_TWO],
    ),
    Example(
        "mistral_list",
        "mistral",
        None,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "a1B2c3D4e"}}, '
        '{"name": "get_time", "arguments": {}, "id": "a1B2c3D4f"}]</s>',
        _TWO,
        special=("[TOOL_CALLS]", "[INST]", "</s>"),
    ),
    Example(
        "mistral_names",
        "mistral",
        "mistral",
        f"[THINK]Weather?[/THINK]Yes.[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{PARIS}"
        "[TOOL_CALLS]get_time[ARGS]{}</s>",
        [Reasoning("Weather?"), Content("Yes."), *_TWO],
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "</s>"),
    ),
    Example(
        "mistral_names_without_arguments_marker",
        "mistral",
        None,
        f"[TOOL_CALLS]get_weather{HARD}[TOOL_CALLS]get_time{{}}",
        [*call(0, "get_weather", HARD), *call(1, "get_time", "{}")],
    ),
    Example(
        "deepseek_v3",
        "deepseek_v3",
        None,
        "One moment."
        + _SECTION.format(_V3.format("get_weather", HARD) + "\n" + _V3.format("get_time", "{}")),
        [Content("One moment."), *call(0, "get_weather", HARD), *call(1, "get_time", "{}")],
    ),
    Example(
        "deepseek_v31",
        "deepseek_v31",
        "deepseek_v3",
        "Weather.</think>Looking."
        + _SECTION.format(_V31.format("get_weather", PARIS) + _V31.format("get_time", "{}")),
        [Reasoning("Weather."), Content("Looking."), *_TWO],
        prompt_end="<｜User｜>Paris?<｜Assistant｜><think>",
        special=("<｜User｜>", "<｜Assistant｜>"),
    ),
    Example(
        "deepseek_v32",
        "deepseek_v32",
        None,
        "\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls><｜end▁of▁sentence｜>",
        [*call(0, "get_weather", '{"city": "Paris", "days": 3}'), *call(1, "get_time", "{}")],
        special=("｜DSML｜", "<｜end▁of▁sentence｜>"),
    ),
    Example(
        "minimax_m2",
        "minimax_m2",
        "minimax_m2",
        'Weather.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris "x"</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>[e~[',
        [
            Reasoning("Weather."),
            Content("I look."),
            *call(0, "get_weather", '{"city": "Paris \\"x\\"", "days": 3}'),
            *call(1, "get_time", "{}"),
        ],
        prompt_end="]~b]ai\n<think>\n",
        special=("<minimax:tool_call>", "</minimax:tool_call>", "]~b]", "[e~["),
    ),
    Example(
        "kimi_k2",
        "kimi_k2",
        None,
        "I look.<|tool_calls_section_begin|>"
        + _KIMI.format("get_weather", 0, PARIS)
        + _KIMI.format("get_time", 1, "{}")
        + "<|tool_calls_section_end|>",
        [Content("I look."), *_TWO],
    ),
    Example(
        "glm45",
        "glm45",
        "glm45",
        "\n<think>Weather.</think>\nI look.\n<tool_call>get_weather\n"
        '<arg_key>city</arg_key>\n<arg_value>Paris "x"</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        '<arg_key>more</arg_key>\n<arg_value>{"a": [true]}</arg_value>\n</tool_call>\n'
        "<tool_call>get_time\n</tool_call>",
        [
            Reasoning("Weather."),
            Content("I look."),
            *call(0, "get_weather", '{"city": "Paris \\"x\\"", "days": 3, "more": {"a": [true]}}'),
            *call(1, "get_time", "{}"),
        ],
    ),
    Example(
        "granite",
        "granite",
        "granite",
        "Here is my thought process:\n\nWeather.\n\nHere is my response:\n\n"
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, '
        '{"name": "get_time", "arguments": {}}]',
        [Reasoning("Weather."), *_TWO],
    ),
    Example(
        "granite33",
        "granite",
        "granite33",
        "<think>Weather.</think>\n<response>It is sunny.</response>",
        [Reasoning("Weather."), Content("It is sunny.")],
    ),
    Example(
        "phi4_mini",
        "phi4_mini_json",
        None,
        f'functools[{{"name": "get_weather", "arguments": {PARIS}}}]',
        call(0, "get_weather", PARIS),
    ),
    Example(
        "hunyuan",
        "hunyuan_a13b",
        "hunyuan_a13b",
        "<think>\nWeather.\n</think>\n<answer>\nI look.\n"
        f'<tool_calls>[{{"name": "get_weather", "arguments": {PARIS}}}]</tool_calls>\n</answer>',
        [Reasoning("Weather."), Content("I look."), *call(0, "get_weather", PARIS)],
    ),
    Example(
        "nemotron",
        "nemotron_json",
        "deepseek_r1",
        "Weather.\n</think>\n\n"
        f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}]</TOOLCALL>\n',
        [Reasoning("Weather."), *call(0, "get_weather", PARIS)],
        prompt_end="<SPECIAL_11>Assistant\n<think>\n\n",
        special=("<SPECIAL_11>",),
    ),
    Example(
        "cohere",
        "cohere_command3",
        "cohere_command3",
        "<|START_THINKING|>Weather.<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {PARIS}}}\n'
        "]<|END_ACTION|><|END_OF_TURN_TOKEN|>",
        [Reasoning("Weather."), *call(0, "get_weather", PARIS)],
        special=("<|START_THINKING|>", "<|START_ACTION|>", "<|END_OF_TURN_TOKEN|>"),
    ),
    Example(
        "harmony_answer",
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>Simple.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        [Reasoning("Simple."), Content("2 + 2 = 4.")],
        prompt_end=_START,
        special=_HARMONY,
    ),
    Example(
        "harmony_preamble_and_call",
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>Need to look.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        f"<|message|>{PARIS}<|call|>",
        [Reasoning("Need to look."), Content("I look it up."), *call(0, "get_weather", PARIS)],
        prompt_end=_START,
        special=_HARMONY,
    ),
    Example(
        "harmony_recipient_in_role",
        "openai",
        "openai_gptoss",
        " to=functions.get_weather<|channel|>analysis code<|message|>"
        f"{HARD}<|call|><|start|>assistant to=get_time<|channel|>commentary<|message|><|call|>",
        [*call(0, "get_weather", HARD), *call(1, "get_time", "{}")],
        prompt_end=_START,
        special=_HARMONY,
    ),
]

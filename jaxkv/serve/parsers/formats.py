"""The formats of tool calls and of reasoning by name, and what in a model's files shows which it uses."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxkv.serve.parsers.harmony import MARKERS as HARMONY_MARKERS
from jaxkv.serve.parsers.json_calls import JsonFormat
from jaxkv.serve.parsers.mistral_calls import MistralFormat
from jaxkv.serve.parsers.pythonic_calls import PythonicFormat
from jaxkv.serve.parsers.reasoning import ReasoningFormat
from jaxkv.serve.parsers.section_calls import SectionFormat
from jaxkv.serve.parsers.tagged_calls import KeyValueFormat, TaggedFormat
from jaxkv.serve.parsers.tool_format import ToolFormat


@dataclass(frozen=True)
class Harmony:
    """OpenAI's format, in which reasoning, content and calls are messages; `HarmonyReader` reads all of it.

    Attributes:
        markers: its markers.
    """

    markers: tuple[str, ...] = HARMONY_MARKERS


@dataclass(frozen=True)
class Entry[Format]:
    """A format and how it is found.

    Attributes:
        format: the format.
        signs: strings that a chat template, or else the special tokens, have if the model uses the format, all of
            them; none if only its name chooses it.
        model_type: how the model's type begins; empty for any.
    """

    format: Format
    signs: tuple[str, ...] = ()
    model_type: str = ""


def _deepseek(words: str) -> str:
    """Returns a marker as DeepSeek's tokenizer spells it, with wide bars and a low line for each blank."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_DSML = "\uff5cDSML\uff5c"
_DEEPSEEK = SectionFormat(
    (_deepseek("tool calls begin"), _deepseek("tool calls end")),
    (_deepseek("tool call begin"), _deepseek("tool call end")),
    _deepseek("tool sep"),
)
_KIMI = SectionFormat(
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
)
_FUNCTION = ("<function=", ">", "</function>")
_PARAMETER = ("<parameter=", "</parameter>")
_THINK = ReasoningFormat(("<think>",), ("</think>",), always=True)

# In the order in which signs are looked for.
TOOL_FORMATS: Mapping[str, Entry[ToolFormat | Harmony]] = {
    "openai": Entry(Harmony(), ("<|channel|>", "<|message|>")),
    "deepseek_v32": Entry(
        TaggedFormat(
            (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
            (f'<{_DSML}invoke name="', '">', f"</{_DSML}invoke>"),
            (f'<{_DSML}parameter name="', f"</{_DSML}parameter>"),
            {'" string="true">': True, '" string="false">': False},
            inner=(_DSML,),
        ),
        (_DSML,),
    ),
    "deepseek_v3": Entry(_DEEPSEEK, (_DEEPSEEK.section[0], "```json")),
    "deepseek_v31": Entry(_DEEPSEEK, (_DEEPSEEK.section[0],)),
    "kimi_k2": Entry(_KIMI, (_KIMI.section[0],)),
    "mistral": Entry(MistralFormat(), ("[TOOL_CALLS]",)),
    "seed_oss": Entry(
        TaggedFormat(("<seed:tool_call>", "</seed:tool_call>"), _FUNCTION, _PARAMETER, {">": None}),
        ("<seed:tool_call>",),
    ),
    "minimax_m2": Entry(
        TaggedFormat(
            ("<minimax:tool_call>", "</minimax:tool_call>"),
            ('<invoke name="', '">', "</invoke>"),
            ('<parameter name="', "</parameter>"),
            {'">': None},
        ),
        ("<minimax:tool_call>",),
    ),
    "glm45": Entry(KeyValueFormat(), ("<arg_key>",)),
    "qwen3_coder": Entry(
        TaggedFormat(
            ("<tool_call>", "</tool_call>"), _FUNCTION, _PARAMETER, {">": None}, bare=True
        ),
        ("<function=",),
    ),
    "nemotron_json": Entry(JsonFormat(("<TOOLCALL>",), ("</TOOLCALL>",)), ("<TOOLCALL>",)),
    "cohere_command3": Entry(
        JsonFormat(("<|START_ACTION|>",), ("<|END_ACTION|>",)), ("<|START_ACTION|>",)
    ),
    "lfm2": Entry(
        PythonicFormat(("<|tool_call_start|>",), ("<|tool_call_end|>",)), ("<|tool_call_start|>",)
    ),
    "olmo3": Entry(
        PythonicFormat(("<function_calls>",), ("</function_calls>",)), ("<function_calls>",)
    ),
    "hunyuan_a13b": Entry(JsonFormat(("<tool_calls>",), ("</tool_calls>",)), ("<tool_calls>",)),
    "phi4_mini_json": Entry(
        JsonFormat(("<|tool_call|>", "functools["), ("<|/tool_call|>",)), ("<|/tool_call|>",)
    ),
    "granite": Entry(
        JsonFormat(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
        ("<|tool_call|>",),
    ),
    "hermes": Entry(JsonFormat(("<tool_call>",), ("</tool_call>",)), ("<tool_call>",)),
    "llama3_json": Entry(JsonFormat(("<|python_tag|>",), unmarked=True), ("<|python_tag|>",)),
    "llama4_pythonic": Entry(
        PythonicFormat(("<|python_start|>",), ("<|python_end|>",), unmarked=True)
    ),
}
REASONING_FORMATS: Mapping[str, Entry[ReasoningFormat | Harmony]] = {
    "openai_gptoss": Entry(Harmony(), ("<|channel|>", "<|message|>")),
    "seed_oss": Entry(ReasoningFormat(("<seed:think>",), ("</seed:think>",)), ("<seed:think>",)),
    "mistral": Entry(ReasoningFormat(("[THINK]",), ("[/THINK]",)), ("[THINK]",)),
    "cohere_command3": Entry(
        ReasoningFormat(
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            removed=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        ("<|START_THINKING|>",),
    ),
    "granite": Entry(
        ReasoningFormat(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
        ("Here is my thought process:",),
    ),
    "hunyuan_a13b": Entry(
        ReasoningFormat(("<think>",), ("</think>",), removed=("<answer>", "</answer>")),
        ("<think>", "<answer>"),
    ),
    "granite33": Entry(
        ReasoningFormat(("<think>",), ("</think>",), removed=("<response>", "</response>")),
        ("<think>", "<response>"),
    ),
    "glm45": Entry(_THINK, ("<think>", "<arg_key>")),
    "qwen3": Entry(
        ReasoningFormat(("<think>",), ("</think>",), always=True, ends_at_call=True),
        ("</think>",),
        model_type="qwen3",
    ),
    "deepseek_r1": Entry(_THINK, ("</think>",)),
}
OTHER_NAMES = {
    "deepseek_v3": "deepseek_r1",
    "gpt_oss": "openai_gptoss",
    "minimax_m2": "deepseek_r1",
    "olmo3": "deepseek_r1",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "granite4": "hermes",
    "jamba": "hunyuan_a13b",
    "llama4_json": "llama3_json",
    "pythonic": "llama4_pythonic",
}
"""Further names of formats. One that is a name of tool calls too is another one of reasoning only."""

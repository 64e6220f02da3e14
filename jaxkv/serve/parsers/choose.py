"""Chooses the parser of a model's answers, by name or by the model's files, and opens it for one answer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxkv.serve.parsers.answer import Answer
from jaxkv.serve.parsers.answer_parser import AnswerParser
from jaxkv.serve.parsers.calls import Calls
from jaxkv.serve.parsers.forced_calls import ToolChoice, chosen_function, read_forced
from jaxkv.serve.parsers.formats import (
    OTHER_NAMES,
    REASONING_FORMATS,
    TOOL_FORMATS,
    Entry,
    Harmony,
)
from jaxkv.serve.parsers.harmony import HarmonyReader, open_header
from jaxkv.serve.parsers.protocol import OutputParser
from jaxkv.serve.parsers.reasoning import read_reasoning
from jaxkv.serve.parsers.source import Source, Steps
from jaxkv.serve.parsers.tool_format import read_content
from jaxkv.text.markers import Markers

NONE = "none"
_HARMONY = "openai"


@dataclass(frozen=True)
class ParserChoice:
    """The parsers of a model.

    Attributes:
        tools: name of the format of tool calls, a key of `formats.TOOL_FORMATS`; `None` if calls are not read.
        reasoning: name of the format of reasoning, a key of `formats.REASONING_FORMATS`; `None` if it is not read.
        keeps_special_tokens: whether a marker is a special token. Then answers must be decoded with
            `skip_special_tokens=False`, and the parser removes the other special tokens.
        special_tokens: texts of the model's special tokens.
    """

    tools: str | None
    reasoning: str | None
    keeps_special_tokens: bool
    special_tokens: tuple[str, ...] = ()


def choose_parsers(
    template: str | None,
    special_tokens: Collection[str],
    model_type: str,
    *,
    tools: str | None = None,
    reasoning: str | None = None,
) -> ParserChoice:
    """Returns the parsers of a model.

    A format is found by markers that the chat template contains, and if there is none, by markers among the special
    tokens. A template that does not mention tools has no tool calls.

    Args:
        template: source of the chat template; `None` if the model has none.
        special_tokens: texts of the special tokens.
        model_type: as in config.json.
        tools: name of the format of tool calls, or "none"; if not given, it is found.
        reasoning: name of the format of reasoning, or "none"; if not given, it is found.

    Raises:
        ValueError: a name is unknown; the message lists the names.
    """
    has_tools = template is None or "tool" in template
    tool_format = (
        _found(TOOL_FORMATS, template, special_tokens if has_tools else (), model_type)
        if tools is None
        else _named(TOOL_FORMATS, tools, "tool parser")
    )
    reasoning_format = (
        _found(REASONING_FORMATS, template, special_tokens, model_type)
        if reasoning is None
        else _named(REASONING_FORMATS, reasoning, "reasoning parser")
    )
    special = tuple(sorted({*special_tokens} - {""}))
    markers = _markers(tool_format, reasoning_format)
    return ParserChoice(tool_format, reasoning_format, not markers.isdisjoint(special), special)


def open_parser(
    choice: ParserChoice,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    thinking: bool | None,
    prompt_end: str,
    tool_choice: ToolChoice = "auto",
    has_form: bool = False,
) -> OutputParser:
    """Returns the parser of one answer.

    Without tools, with the tool choice "none", and in structured output, markers of tool calls are content. A demanded
    call may come in the model's own format or as `forced_schema` describes it; in the harmony format only in the
    model's own.

    Args:
        choice: the model's parsers.
        tools: the request's tools in OpenAI's form; `None` or none.
        thinking: whether the request asks for reasoning; `None` if it says nothing.
        prompt_end: the last characters of the rendered prompt, 200 or more: templates may begin the reasoning there.
        tool_choice: "auto", "none", "required", or the one function to call.
        has_form: whether a grammar demands the form of the answer behind its reasoning, or that of the call.

    Raises:
        ValueError: the tool choice has another form.
    """
    function = chosen_function(tool_choice)
    tools = () if tools is None or tool_choice == NONE else tools
    is_forced = bool(tools) and tool_choice != "auto"
    tools = () if has_form and not is_forced else tools
    tool_format = TOOL_FORMATS[choice.tools].format if choice.tools and tools else None
    calls_format = None if isinstance(tool_format, Harmony) else tool_format
    reasoning = REASONING_FORMATS[choice.reasoning].format if choice.reasoning else None
    # Ordinary tokens of structured output may spell what is removed elsewhere.
    removed = _removed(choice) if has_form else ()

    def read(source: Source, answer: Answer) -> Steps[None]:
        calls = Calls(source, answer, tools)
        if choice.tools == _HARMONY or isinstance(reasoning, Harmony):
            known = calls if tool_format else None
            reader = HarmonyReader(
                source,
                answer,
                known,
                reasoning=reasoning is not None,
                only_final=has_form,
                removed=removed,
            )
            yield from reader.read(open_header(prompt_end))
            return
        if reasoning is not None:
            is_open = reasoning.is_open(prompt_end, choice.special_tokens, thinking)
            # The grammar begins behind the end marker, so a call cannot end the reasoning.
            ending = None if has_form else calls_format
            yield from read_reasoning(
                source,
                answer,
                reasoning,
                is_open=is_open,
                tool_format=ending,
                calls=calls,
                removed=removed,
            )
        if is_forced:
            yield from read_forced(calls, function, has_form=has_form)
        is_form = has_form and (calls.begun > 0 or not is_forced)
        if is_form and (names := _removal(choice)) is not None:
            yield from source.form(names, answer.content)
        elif is_form or calls_format is None:
            yield from source.rest(answer.content)
        else:
            yield from read_content(source, answer, calls_format, calls)

    return AnswerParser(read, None if has_form else _removal(choice))


@lru_cache(maxsize=8)
def _removal(choice: ParserChoice) -> Markers | None:
    """Returns the markers of what is no part of an answer; `None` if there are none."""
    removed = _removed(choice)
    return Markers(removed) if removed else None


def _removed(choice: ParserChoice) -> set[str]:
    """Returns the texts that are no part of an answer."""
    reasoning = REASONING_FORMATS[choice.reasoning].format if choice.reasoning else None
    removed = set(() if reasoning is None or isinstance(reasoning, Harmony) else reasoning.removed)
    if choice.keeps_special_tokens:
        removed |= {*choice.special_tokens} - _markers(choice.tools, choice.reasoning)
    return removed


def _markers(tools: str | None, reasoning: str | None) -> set[str]:
    """Returns the markers of two formats."""
    formats = [TOOL_FORMATS[tools].format] if tools else []
    thoughts = [REASONING_FORMATS[reasoning].format] if reasoning else []
    return {marker for format in (*formats, *thoughts) for marker in format.markers}


def _named(entries: Mapping[str, Entry], name: str, what: str) -> str | None:
    if name == NONE:
        return None
    known = name if name in entries else OTHER_NAMES.get(name)
    if known not in entries:
        others = [other for other, meant in OTHER_NAMES.items() if meant in entries]
        names = ", ".join(sorted({*entries, *others, NONE}))
        raise ValueError(f"there is no {what} {name!r}; choose one of {names}")
    return known


def _found(
    entries: Mapping[str, Entry], template: str | None, tokens: Collection[str], model_type: str
) -> str | None:
    """Returns the name of the first format whose signs a chat template has, or else the special tokens."""
    for texts in ((template,), tokens):
        for name, entry in entries.items():
            if (
                entry.signs
                and model_type.startswith(entry.model_type)
                and all(
                    any(text is not None and sign in text for text in texts) for sign in entry.signs
                )
            ):
                return name
    return None

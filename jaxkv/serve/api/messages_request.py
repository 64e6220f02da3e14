"""A request of `/v1/messages`, read as a request of `/v1/chat/completions`.

Source: Anthropic's Messages API.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxkv.config.checks import INT32_MAX
from jaxkv.config.sampling import MAX_STOP_STRINGS, MAX_STRING_CHARACTERS
from jaxkv.serve.api.as_chat import (
    chat_fields,
    check_known,
    closed_object,
    each_object,
    joined_text,
    kind_of,
    nullable,
    refused,
    typed,
    word_of,
)

Json = dict[str, Any]

CHAT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Field of the chat request -> field of the request that it comes from, for error messages."""

_SAME = (
    "model",
    "stream",
    "temperature",
    "top_k",
    "top_p",
    # An extra of this server, as in chat requests.
    "logits_processors",
)
"""Fields that a chat request has under the same name."""

_IGNORED = {"metadata": dict, "service_tier": str, "inference_geo": str}
"""Fields that change nothing here -> their type."""

_TEXT = {"text": "text"}


_KINDS_OF_THINKING = ("enabled", "disabled", "adaptive")
_KINDS_OF_CHOICE = ("auto", "any", "tool", "none")
_OWN: Mapping[str, Json] = {
    "inference_geo": nullable({"type": "string"}),
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["user", "assistant"]},
                "content": {
                    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]
                },
            },
        },
    },
    "metadata": nullable({"type": "object"}),
    "output_config": nullable(closed_object({"effort": {}, "format": {}})),
    "output_format": nullable({"type": "object"}),
    "service_tier": nullable({"type": "string"}),
    "stop_sequences": nullable(
        {
            "type": "array",
            "maxItems": MAX_STOP_STRINGS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STRING_CHARACTERS},
        }
    ),
    "system": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"const": "text"}},
                },
            },
            {"type": "null"},
        ]
    },
    "thinking": nullable(
        closed_object(
            {"type": {"enum": [*_KINDS_OF_THINKING, None]}, "budget_tokens": {}, "display": {}}
        )
    ),
    "tool_choice": nullable(
        closed_object(
            {
                "type": {"enum": list(_KINDS_OF_CHOICE)},
                "name": {},
                "disable_parallel_tool_use": nullable({"type": "boolean"}),
            }
        )
    ),
    "tools": nullable(
        {
            "type": "array",
            "items": {"type": "object", "properties": {"type": {"enum": ["custom", None]}}},
        }
    ),
}
"""Fields that a chat request does not have -> their JSON schema; `max_tokens` is not needed to count tokens."""

_MAX_TOKENS = {"type": "integer", "minimum": 1, "maximum": INT32_MAX}
_FIELDS = {**chat_fields(_SAME), **_OWN}
SCHEMA = closed_object({**_FIELDS, "max_tokens": _MAX_TOKENS}, "model", "messages", "max_tokens")
"""The JSON schema of a request."""

COUNT_SCHEMA = closed_object({**_FIELDS, "max_tokens": {}}, "model", "messages")
"""The JSON schema of a request of `/v1/messages/count_tokens`."""


def as_chat(body: Mapping[str, Any], *, counts_only: bool = False) -> Json:
    """Returns the body of the chat request that asks for the same.

    A last message of the assistant is the beginning of the answer, as in the API.

    Args:
        body: the body of the request.
        counts_only: read a request of `/v1/messages/count_tokens`, which has no `max_tokens`.

    Raises:
        ApiError: a field is unknown, has the wrong type, or asks for what this server cannot do.
    """
    check_known(body, SCHEMA["properties"])
    for name, kind in _IGNORED.items():
        typed(body, name, kind, kind())
    chat: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
    if not counts_only:
        if body.get("max_tokens") is None:
            raise refused("max_tokens", "max_tokens is missing; give the most tokens to generate")
        chat["max_completion_tokens"] = typed(body, "max_tokens", int, 0)
    if (stops := body.get("stop_sequences")) is not None:
        chat["stop"] = typed(body, "stop_sequences", list, stops)
    chat["messages"] = _messages(body)
    if chat["messages"][-1]["role"] == "assistant":
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    chat |= _tools(body)
    chat |= _format(body)
    chat |= _thinking(body)
    return chat


def _messages(body: Mapping[str, Any]) -> list[Json]:
    messages: list[Json] = []
    if (system := body.get("system")) is not None:
        messages.append({"role": "system", "content": joined_text(system, _TEXT, "system")})
    given = typed(body, "messages", list, [])
    if not given:
        raise refused("messages", "messages must be a list of at least one message")
    for where, message in each_object(given, "messages"):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            got = kind_of(content)
            raise refused(
                f"{where}.content",
                f"{where}.content must be a string or a list of blocks, got {got}",
            )
        blocks = list(each_object(content, f"{where}.content"))
        if role == "user":
            if not blocks:
                raise refused(f"{where}.content", f"{where}.content is empty; give a block of text")
            messages += _user(blocks)
        elif role == "assistant":
            messages.append(_assistant(blocks))
        else:
            raise refused(
                f"{where}.role", f"{where}.role must be user or assistant, got {word_of(role)}"
            )
    return messages


def _user(blocks: list[tuple[str, Mapping[str, Any]]]) -> list[Json]:
    """Returns the messages of a user's blocks: each result of a tool is a message of its own."""
    made: list[Json] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            made.append({"role": "user", "content": "".join(texts)})
            texts.clear()

    for where, block in blocks:
        if block.get("type") == "tool_result":
            end_text()
            text = joined_text(block.get("content") or "", _TEXT, f"{where}.content")
            call = typed(block, "tool_use_id", str, "", where)
            made.append({"role": "tool", "tool_call_id": call, "content": text})
        else:
            texts.append(_block_text(block, where))
    end_text()
    return made


def _block_text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise refused(
            f"{where}.type",
            f"{where}.type must be text or tool_result, since the model reads text alone, got "
            f"{word_of(block.get('type'))}",
        )
    return typed(block, "text", str, "", where)


def _assistant(blocks: list[tuple[str, Mapping[str, Any]]]) -> Json:
    texts, calls, thoughts = [], [], []
    for where, block in blocks:
        match block.get("type"):
            case "text":
                texts.append(typed(block, "text", str, "", where))
            case "thinking":
                thoughts.append(typed(block, "thinking", str, "", where))
            case "redacted_thinking":
                continue
            case "tool_use":
                arguments = json.dumps(typed(block, "input", dict, {}, where))
                function = {"name": typed(block, "name", str, "", where), "arguments": arguments}
                number = typed(block, "id", str, "", where)
                calls.append({"id": number, "type": "function", "function": function})
            case other:
                raise refused(
                    f"{where}.type",
                    f"{where}.type must be text, thinking, redacted_thinking or tool_use, got "
                    f"{word_of(other)}",
                )
    message: Json = {"role": "assistant", "content": "".join(texts) if texts else None}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message


def _tools(body: Mapping[str, Any]) -> Json:
    found: Json = {}
    tools = []
    for where, tool in each_object(typed(body, "tools", list, []), "tools"):
        if tool.get("type") not in (None, "custom"):
            got = word_of(tool["type"])
            raise refused(
                f"{where}.type",
                f'{where}.type must be "custom", got {got}; this server runs no tools',
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    if tools:
        found["tools"] = tools
    choice = typed(body, "tool_choice", dict, {})
    if not choice:
        return found
    check_known(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
    if typed(choice, "disable_parallel_tool_use", bool, False, "tool_choice"):
        found["parallel_tool_calls"] = False
    match choice.get("type"):
        case "auto" | "none" as same:
            found["tool_choice"] = same
        case "any":
            found["tool_choice"] = "required"
        case "tool":
            name = typed(choice, "name", str, "", "tool_choice")
            found["tool_choice"] = {"type": "function", "function": {"name": name}}
        case other:
            raise refused(
                "tool_choice.type",
                f"tool_choice.type must be one of {', '.join(_KINDS_OF_CHOICE)}, got {word_of(other)}",
            )
    return found


def _format(body: Mapping[str, Any]) -> Json:
    config = typed(body, "output_config", dict, {})
    check_known(config, ("effort", "format"), "output_config")
    given = config.get("format") or typed(body, "output_format", dict, {})
    if not given:
        return {}
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        raise refused(
            "output_config.format",
            f'output_config.format must have type "json_schema", got {kind_of(given)}',
        )
    schema = {"name": "output", "schema": given.get("schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _thinking(body: Mapping[str, Any]) -> Json:
    """Returns whether the model is to think, as most templates call it."""
    given = typed(body, "thinking", dict, {})
    check_known(given, ("type", "budget_tokens", "display"), "thinking")
    match given.get("type"):
        case None | "adaptive":
            return {}
        case "enabled" | "disabled" as kind:
            return {"chat_template_kwargs": {"enable_thinking": kind == "enabled"}}
        case other:
            raise refused(
                "thinking.type",
                f"thinking.type must be one of {', '.join(_KINDS_OF_THINKING)}, got {word_of(other)}",
            )

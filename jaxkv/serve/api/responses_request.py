"""A request of `/v1/responses`, read as a request of `/v1/chat/completions`.

Source: Open Responses, https://www.openresponses.org. The server keeps no responses, so a request that refers to an
earlier one is refused: clients send the whole conversation.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.config.checks import INT32_MAX
from jaxkv.config.sampling import MAX_LOGPROBS, SamplingParams
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
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Field of the chat request -> field of the request that it comes from, for error messages."""

_SAME = (
    "frequency_penalty",
    "metadata",
    "model",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "stream",
    "temperature",
    "top_p",
    "user",
    # Extras of this server, as in chat requests.
    "cache_salt",
    "chat_template_kwargs",
    "ignore_eos",
    "logit_bias",
    "logits_processors",
    "min_p",
    "min_tokens",
    "priority",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "top_k",
)
"""Fields that a chat request has under the same name."""

_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_INPUT_PARTS = {"input_text": "text", "text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_PARTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}


_FORMATS = ("text", "json_object", "json_schema")
_NOTHING = {"type": "null"}
_FUNCTION = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"const": "function"}},
}
_OWN: Mapping[str, Json] = {
    "background": {"enum": [False, None]},
    "conversation": _NOTHING,
    "include": nullable({"type": "array", "items": {"enum": list(_INCLUDED)}}),
    "input": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": {"type": "object"}},
        ]
    },
    "instructions": nullable({"type": "string"}),
    "max_output_tokens": nullable({"type": "integer", "minimum": 1, "maximum": INT32_MAX}),
    "max_tool_calls": nullable({"type": "integer", "minimum": 1, "maximum": INT32_MAX}),
    "previous_response_id": _NOTHING,
    "prompt": _NOTHING,
    "reasoning": nullable(
        closed_object(
            {"effort": {"enum": [*_EFFORTS, None]}, "generate_summary": {}, "summary": {}}
        )
    ),
    "store": nullable({"type": "boolean"}),
    "stream_options": nullable(closed_object({"include_obfuscation": {}})),
    "text": nullable(
        closed_object(
            {
                "format": nullable(
                    {"type": "object", "properties": {"type": {"enum": list(_FORMATS)}}}
                ),
                "verbosity": {},
            }
        )
    ),
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, _FUNCTION]},
    "tools": nullable({"type": "array", "items": _FUNCTION}),
    "top_logprobs": nullable({"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}),
    "truncation": {"enum": ["disabled", None]},
}
"""Fields that a chat request does not have -> their JSON schema."""

SCHEMA = closed_object({**chat_fields(_SAME), **_OWN}, "model", "input")
"""The JSON schema of a request."""


def as_chat(body: Mapping[str, Any]) -> Json:
    """Returns the body of the chat request that asks for the same.

    Args:
        body: the body of the request.

    Raises:
        ApiError: a field is unknown, has the wrong type, or asks for what this server cannot do.
    """
    check_known(body, SCHEMA["properties"])
    _refuse_state(body)
    chat: Json = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = _messages(body)
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = typed(body, "max_output_tokens", int, 0)
    chat |= _tools(body)
    chat |= _format(body)
    reasoning = typed(body, "reasoning", dict, {})
    check_known(reasoning, ("effort", "generate_summary", "summary"), "reasoning")
    if (effort := reasoning.get("effort")) is not None:
        if effort not in _EFFORTS:
            raise refused(
                "reasoning.effort",
                f"reasoning.effort must be one of {', '.join(_EFFORTS)}, got {word_of(effort)}",
            )
        chat["reasoning_effort"] = effort
    top_logprobs = _within(body, "top_logprobs", 0, MAX_LOGPROBS)
    if "message.output_text.logprobs" in _included(body):
        chat |= {"logprobs": True, "top_logprobs": top_logprobs}
    return chat


def _within(body: Mapping[str, Any], name: str, least: int, most: int) -> int:
    """Returns an integer of the request, or `least` if it is not given; raises `ApiError` if it is out of range."""
    value = typed(body, name, int, least)
    if not least <= value <= most:
        raise refused(name, f"{name} must be from {least} to {most}, got {kind_of(value)}")
    return value


def echoed(body: Mapping[str, Any], model: str, params: SamplingParams) -> Json:
    """Returns the fields of a response that repeat its request.

    Args:
        body: the body of the request, which `as_chat` has read.
        model: name of the served model.
        params: sampling parameters of the request.
    """
    text, reasoning = body.get("text") or {}, body.get("reasoning")
    return {
        "model": model,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "previous_response_id": None,
        "tools": [_echoed_tool(tool) for tool in body.get("tools") or ()],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": _or(body.get("parallel_tool_calls"), True),
        "text": {"format": _echoed_format(text.get("format") or {})},
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")}
        if reasoning
        else None,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": _or(body.get("presence_penalty"), 0.0),
        "frequency_penalty": _or(body.get("frequency_penalty"), 0.0),
        "top_logprobs": body.get("top_logprobs") or 0,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "service_tier": "default",
        "metadata": body.get("metadata") or {},
        "safety_identifier": body.get("safety_identifier"),
        "prompt_cache_key": body.get("prompt_cache_key"),
    }


def _or(value: object, default: object) -> object:
    return default if value is None else value


def _refuse_state(body: Mapping[str, Any]) -> None:
    """Refuses what would need responses to be kept, and work without a waiting client."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise refused(
                name, f"{name} refers to what this server does not keep; send all of it as input"
            )
    if typed(body, "background", bool, False):
        raise refused("background", "background must be false; this server keeps no responses")
    typed(body, "store", bool, False)
    _within(body, "max_tool_calls", 1, INT32_MAX)
    if body.get("truncation") not in (None, "disabled"):
        got = word_of(body["truncation"])
        raise refused("truncation", f'truncation must be "disabled", got {got}; shorten the input')
    check_known(typed(body, "stream_options", dict, {}), ("include_obfuscation",), "stream_options")


def _included(body: Mapping[str, Any]) -> list[str]:
    included = typed(body, "include", list, [])
    for name in included:
        if name not in _INCLUDED:
            raise refused(
                "include", f"include may have {' and '.join(_INCLUDED)}, got {word_of(name)}"
            )
    return included


def _messages(body: Mapping[str, Any]) -> list[Json]:
    messages: list[Json] = []
    if instructions := typed(body, "instructions", str, ""):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    if not isinstance(given, list) or not given:
        got = kind_of(given)
        raise refused("input", f"input must be a string or a list of items, got {got}")
    for where, item in each_object(given, "input"):
        _add_item(messages, item, where)
    return messages


def _add_item(messages: list[Json], item: Mapping[str, Any], where: str) -> None:
    """Adds one item; reasoning and calls are part of the assistant's message beside them."""
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise refused(
                f"{where}.role",
                f"{where}.role must be user, assistant, system or developer, got {word_of(role)}",
            )
        text = joined_text(item.get("content"), _INPUT_PARTS, f"{where}.content")
        if role == "assistant":
            message = _assistant(messages)
            message["content"] = (message.get("content") or "") + text
        else:
            messages.append({"role": role, "content": text})
    elif kind == "function_call":
        call = {
            name: typed(item, name, str, "", where) for name in ("call_id", "name", "arguments")
        }
        function = {"name": call["name"], "arguments": call["arguments"]}
        _assistant(messages).setdefault("tool_calls", []).append(
            {"id": call["call_id"], "type": "function", "function": function}
        )
    elif kind == "function_call_output":
        text = joined_text(item.get("output"), _INPUT_PARTS, f"{where}.output")
        found = typed(item, "call_id", str, "", where)
        messages.append({"role": "tool", "tool_call_id": found, "content": text})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = joined_text(parts, _REASONING_PARTS, f"{where}.content")
        if text:
            message = _assistant(messages, begin=True)
            message["reasoning_content"] = message.get("reasoning_content", "") + text
    else:
        raise refused(
            f"{where}.type",
            f"{where}.type must be message, function_call, function_call_output or reasoning, got "
            f"{word_of(kind)}",
        )


def _assistant(messages: list[Json], *, begin: bool = False) -> Json:
    """Returns the assistant's message that the last items belong to, or a new one.

    Args:
        messages: the messages so far.
        begin: begin a new one, unless the last one has reasoning alone.
    """
    last = messages[-1] if messages else {}
    goes_on = last.get("role") == "assistant"
    if goes_on and begin:
        goes_on = last.get("content") is None and not last.get("tool_calls")
    if not goes_on:
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _tools(body: Mapping[str, Any]) -> Json:
    found: Json = {}
    tools = []
    for where, tool in each_object(typed(body, "tools", list, []), "tools"):
        if tool.get("type") != "function":
            got = word_of(tool.get("type"))
            raise refused(f"{where}.type", f'{where}.type must be "function", got {got}')
        fields = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in fields if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    if tools:
        found["tools"] = tools
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            got = word_of(choice.get("type"))
            raise refused(
                "tool_choice.type",
                f'tool_choice.type must be "function", got {got}; list the allowed tools in tools',
            )
        name = typed(choice, "name", str, "", "tool_choice")
        found["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif choice is not None:
        found["tool_choice"] = choice
    return found


def _format(body: Mapping[str, Any]) -> Json:
    text = typed(body, "text", dict, {})
    check_known(text, ("format", "verbosity"), "text")
    given = typed(text, "format", dict, {}, "text")
    kind = given.get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind not in _FORMATS:
        raise refused(
            "text.format.type",
            f"text.format.type must be {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}, got {word_of(kind)}",
        )
    fields = ("name", "description", "schema", "strict")
    schema = {name: given[name] for name in fields if given.get(name) is not None}
    return {"response_format": {"type": kind, "json_schema": schema}}


def _echoed_tool(tool: Mapping[str, Any]) -> Json:
    return {
        "type": "function",
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": _or(tool.get("strict"), True),
    }


def _echoed_format(given: Mapping[str, Any]) -> Json:
    kind = given.get("type", "text")
    if kind != "json_schema":
        return {"type": kind}
    return {
        "type": "json_schema",
        "name": given.get("name"),
        "description": given.get("description"),
        "schema": given.get("schema"),
        "strict": bool(given.get("strict")),
    }

"""The messages and tools of a chat request as its model's chat template takes them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.serve.api.chat_body import ChatBody, Message, RefusalPart, TextPart
from jaxkv.serve.http.errors import bad_request
from jaxkv.text.chat_template import ChatOptions
from jaxkv.text.tokenizer import Tokenizer

_DEVELOPER = "developer"


def template_messages(
    messages: Sequence[Message], tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """Returns the messages as JSON objects. Parts of a content are joined by line breaks.

    Args:
        messages: the messages of the request.
        tokenizer: its template decides whether the role "developer" is known; otherwise it becomes "system".
    """
    template = tokenizer.chat_template if tokenizer is not None else None
    sources = template.templates.values() if template is not None else ()
    knows_developer = any(_DEVELOPER in source for source in sources)
    return [_as_json(message, knows_developer) for message in messages]


def body_options(body: ChatBody, tools: Any, tokenizer: Tokenizer | None) -> ChatOptions:  # noqa: ANN401 - JSON
    """Returns the options of the template for a chat request.

    Args:
        body: the request.
        tools: its tools as it wrote them.
        tokenizer: see `chat_options`.

    Raises:
        ApiError: see `chat_options`.
    """
    given = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        given.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            given.setdefault("enable_thinking", False)
    options = ChatOptions(
        tools=tools if body.offered else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=given,
    )
    return chat_options(options, tokenizer)


def chat_options(options: ChatOptions, tokenizer: Tokenizer | None) -> ChatOptions:
    """Returns the options if a request may give them.

    Args:
        options: what it gives.
        tokenizer: its special tokens cannot be set by a request.

    Raises:
        ApiError: 400 for a reserved variable, or a prompt that ends in two ways.
    """
    named = tokenizer.special_tokens if tokenizer is not None else {}
    for name in options.chat_template_kwargs or {}:
        if name in named or name in _RESERVED:
            raise bad_request(
                f"the template's variable {name} cannot be set; use another name",
                "chat_template_kwargs",
            )
    if options.add_generation_prompt and options.continue_final_message:
        raise bad_request(
            "add_generation_prompt begins a new turn and continue_final_message continues the last one; choose one",
            "continue_final_message",
        )
    return options


def thinking(options: ChatOptions) -> bool | None:
    """Returns whether a request asks for reasoning; `None` if it says nothing."""
    given = options.chat_template_kwargs or {}
    for name in ("enable_thinking", "thinking"):
        if isinstance(value := given.get(name), bool):
            return value
    return None


_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
    }
)


def _as_json(message: Message, knows_developer: bool) -> dict[str, Any]:
    role = message.role
    if role == _DEVELOPER and not knows_developer:
        role = "system"
    found: dict[str, Any] = {"role": role, "content": _text(message.content)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    reasoning = message.reasoning or message.reasoning_content
    if reasoning is not None:
        # Templates read it under different names; harmony's calls it thinking.
        found |= dict.fromkeys(("reasoning", "reasoning_content", "thinking"), reasoning)
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return found


def _text(content: str | list[TextPart | RefusalPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _arguments(text: str) -> Mapping[str, Any] | str:
    """Returns the arguments of an earlier call as templates take them, an object; what is none stays as it is.

    Clients send calls without arguments as an empty text too.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text

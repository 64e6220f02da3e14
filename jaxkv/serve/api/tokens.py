"""`/tokenize` and `/detokenize`, with the bodies of vLLM."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxkv.config.checks import INT32_MAX
from jaxkv.serve.api.chat_body import Message, Setting, Tool, Variable, check_message
from jaxkv.serve.api.conversation import chat_options, template_messages
from jaxkv.serve.api.state import check_model
from jaxkv.serve.http.errors import bad_request
from jaxkv.serve.http.json_body import convert
from jaxkv.serve.http.operation import Operation
from jaxkv.serve.http.replies import Reply
from jaxkv.serve.http.request import Request
from jaxkv.serve.http.service import Service
from jaxkv.text.chat_template import ChatOptions


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The body of `/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[Variable, Setting], Meta(max_length=32)] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The body of `/detokenize`."""

    tokens: list[Annotated[int, Meta(ge=0, le=INT32_MAX)]]
    model: str | None = None


async def tokenize(service: Service, request: Request) -> Reply:
    """Answers the token ids of a text or a conversation."""
    tree = request.json()
    body = convert(tree, TokenizeBody)
    if body.model is not None:
        check_model(service, body.model)
    ids = await _ids(service, body, tree)
    texts = service.token_texts
    return Reply.json(
        {
            "count": len(ids),
            "max_model_len": service.facts.max_model_len,
            "tokens": ids,
            "token_strs": [texts.text(each) for each in ids] if body.return_token_strs else None,
        }
    )


async def detokenize(service: Service, request: Request) -> Reply:
    """Answers the text of token ids."""
    body = convert(request.json(), DetokenizeBody)
    if body.model is not None:
        check_model(service, body.model)
    if body.tokens:
        service.check_ids(body.tokens, "tokens")
    return Reply.json({"prompt": await service.decode(body.tokens)})


async def _ids(service: Service, body: TokenizeBody, tree: Mapping[str, Any]) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return await service.encode(body.prompt, add_special=body.add_special_tokens is not False)
    assert body.messages is not None
    for index, message in enumerate(body.messages):
        check_message(message, f"messages[{index}]")
    options = chat_options(
        ChatOptions(
            tools=tree.get("tools"),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=body.chat_template_kwargs,
        ),
        service.tokenizer,
    )
    messages = template_messages(body.messages, service.tokenizer)
    return (await service.encode_chat(messages, options)).ids


OPERATIONS = (
    Operation(
        path="/tokenize",
        method="POST",
        handler=tokenize,
        summary="The token ids of a text or a conversation",
        body=TokenizeBody,
        reply={
            "type": "object",
            "required": ["count", "max_model_len", "tokens", "token_strs"],
            "properties": {
                "count": {"type": "integer"},
                "max_model_len": {"type": "integer"},
                "tokens": {"type": "array", "items": {"type": "integer"}},
                "token_strs": {"type": ["array", "null"], "items": {"type": "string"}},
            },
        },
        errors=(400, 401, 404, 413, 415, 503, 504),
    ),
    Operation(
        path="/detokenize",
        method="POST",
        handler=detokenize,
        summary="The text of token ids",
        body=DetokenizeBody,
        reply={
            "type": "object",
            "required": ["prompt"],
            "properties": {"prompt": {"type": "string"}},
        },
        errors=(400, 401, 404, 413, 415, 503, 504),
    ),
)

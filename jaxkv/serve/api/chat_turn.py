"""`ChatTurn`: the answer to a conversation, as events: what every chat API has in common."""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxkv.config.reasoning_tokens import ReasoningTokens
from jaxkv.config.sampling import SamplingParams
from jaxkv.config.structured_outputs import StructuredOutputs
from jaxkv.serve.api.chat_body import ChatBody, ChosenTool
from jaxkv.serve.api.conversation import body_options, template_messages, thinking
from jaxkv.serve.api.sampling_fields import without_refused
from jaxkv.serve.api.state import check_model
from jaxkv.serve.generation import Delta
from jaxkv.serve.http.errors import ApiError, bad_request
from jaxkv.serve.http.json_body import convert
from jaxkv.serve.http.request import Request
from jaxkv.serve.http.service import ChatPrompt, Service
from jaxkv.serve.http.work import Usage, Work, check_prompts
from jaxkv.serve.parsers.choose import ParserChoice, open_parser
from jaxkv.serve.parsers.events import (
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from jaxkv.serve.parsers.forced_calls import ToolChoice, forced_schema
from jaxkv.serve.parsers.protocol import OutputParser
from jaxkv.serve.parsers.reasoning_ids import reasoning_tokens
from jaxkv.text.chat_template import ChatOptions
from jaxkv.wording import clip


@dataclass(frozen=True)
class TurnDelta:
    """New events of one sample.

    Attributes:
        sample: index of the sample.
        events: what the text became; empty while it may become several things.
        delta: its tokens and log-probabilities.
        finish_reason: "stop", "length" or "tool_calls" on the last delta of a sample, otherwise `None`.
    """

    sample: int
    events: Sequence[Event]
    delta: Delta
    finish_reason: str | None


class ChatTurn:
    """The samples of one answer. `open_turn` makes it; nothing runs in the engine before `deltas`.

    Args:
        body: the request.
        work: its generation.
        parsers: one for each sample.

    Attributes:
        body: the request.
        reasoning_tokens: tokens so far that brought reasoning. Of tokens that came together and brought other text too,
            it counts the share that reasoning has of their characters.
    """

    def __init__(self, body: ChatBody, work: Work, parsers: list[OutputParser]) -> None:
        self.body = body
        self.reasoning_tokens = 0
        self.work = work
        self._parsers = parsers
        self._calls = [0] * len(parsers)

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self.work.usage

    async def deltas(self) -> AsyncGenerator[list[TurnDelta]]:
        """Begins the answer and yields its events until all samples have ended. Closing the generator aborts them.

        Raises:
            ApiError and others: see `Work.deltas`.
        """
        async with contextlib.aclosing(self.work.deltas()) as deltas:
            async for batch in deltas:
                yield [self._take(delta) for _, delta in batch]

    def _take(self, delta: Delta) -> TurnDelta:
        parser = self._parsers[delta.sample]
        events = parser.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events += parser.finish()
        events = self._wanted(delta.sample, events)
        self.reasoning_tokens += reasoning_share(events, delta)
        if self.body.include_reasoning is False:
            events = [event for event in events if not isinstance(event, Reasoning)]
        reason = delta.finish_reason
        if reason == "stop" and self._calls[delta.sample]:
            reason = "tool_calls"
        return TurnDelta(delta.sample, events, delta, reason)

    def _wanted(self, sample: int, events: list[Event]) -> list[Event]:
        """Counts the calls, and drops all but the first if the request wants one."""
        self._calls[sample] += sum(isinstance(event, ToolCallBegin) for event in events)
        if self.body.parallel_tool_calls is not False:
            return events
        return [
            event
            for event in events
            if not isinstance(event, ToolCallBegin | ToolCallArguments) or event.index == 0
        ]


def reasoning_share(events: Sequence[Event], delta: Delta) -> int:
    """Returns how many tokens of a delta brought reasoning."""
    written = sum(len(event.text) for event in events if isinstance(event, Reasoning))
    if not written:
        return 0
    if all(isinstance(event, Reasoning) for event in events):
        return len(delta.ids)
    return min(len(delta.ids), round(len(delta.ids) * written / max(1, len(delta.text))))


async def open_turn(service: Service, request: Request, tree: Mapping[str, Any]) -> ChatTurn:
    """Returns the answer to a conversation, which has not begun.

    Args:
        service: the served model.
        request: for its id and its key.
        tree: the JSON of a body of `/v1/chat/completions`.

    Raises:
        ApiError: 4xx for a body that cannot be served, 429 and 503 if nothing can begin now.
    """
    body = convert(without_refused(tree), ChatBody)
    adapter = check_model(service, body.model)
    body.check()
    check_prompts(service, 1, body.n or 1)
    choice = service.parsers
    tool_choice = _tool_choice(body)
    if body.offered and choice.tools is None and tool_choice == "auto":
        raise bad_request("the model has no known format of tool calls; give no tools", "tools")
    defaults, forced = service.facts.sampling_defaults, _forced(body, tree, tool_choice)
    params = _sampling(body, defaults, choice.keeps_special_tokens, forced)
    params = replace(params, lora=adapter)
    if body.offered and tool_choice != "auto":
        _refuse_channels(choice, "tool_choice")
    options = body_options(body, tree.get("tools"), service.tokenizer)
    messages = template_messages(body.messages, service.tokenizer)
    prompt = await service.encode_chat(messages, options)
    has_form = params.structured_outputs is not None
    if params.structured_outputs is not None:
        tokens = _reasoning_tokens(service, options, prompt)
        form = replace(params.structured_outputs, reasoning=tokens)
        params = replace(params, structured_outputs=form)
        if tokens is None:
            _refuse_channels(choice, "response_format")
            choice = replace(choice, reasoning=None)
    service.check_length(len(prompt.ids), params, "messages")
    work = Work(
        service,
        [prompt.ids],
        params,
        priority=body.priority or 0,
        salt=request.salt(body.cache_salt),
        request_id=request.id,
        demanding="tools" if forced is not None else body.demanding,
    )
    parsers = [
        open_parser(
            choice,
            tools=tree["tools"] if body.offered else None,
            thinking=thinking(options),
            prompt_end=prompt.end,
            tool_choice=tool_choice,
            has_form=has_form,
        )
        for _ in range(params.n)
    ]
    return ChatTurn(body, work, parsers)


def _tool_choice(body: ChatBody) -> ToolChoice:
    match body.tool_choice:
        case ChosenTool(function=function):
            return {"type": "function", "function": {"name": function.name}}
        case None:
            return "auto"
        case word:
            return word


def _forced(
    body: ChatBody, tree: Mapping[str, Any], tool_choice: ToolChoice
) -> StructuredOutputs | None:
    """Returns what the answer must be for a demanded tool call; `None` if none is demanded."""
    if not body.offered:
        return None
    try:
        schema = forced_schema(tree["tools"], tool_choice)
        forced = None if schema is None else StructuredOutputs(json=schema)
    except ValueError as error:
        raise bad_request(clip(error, 300), "tools") from error
    if forced is not None and body.demanded() is not None:
        raise bad_request("tool_choice demands a call, which leaves no other form", "tool_choice")
    return forced


def _reasoning_tokens(
    service: Service, options: ChatOptions, prompt: ChatPrompt
) -> ReasoningTokens | None:
    """Returns what marks the reasoning before structured output; see `reasoning_tokens`."""
    tokenizer = service.tokenizer
    if tokenizer is None:
        return None
    return reasoning_tokens(
        service.parsers, tokenizer.id_of, thinking=thinking(options), prompt_end=prompt.end
    )


def _refuse_channels(choice: ParserChoice, field: str) -> None:
    """Raises `ApiError` if the model writes its answers in channels, which structured output has no place in."""
    if "openai" in (choice.tools or "") or "openai" in (choice.reasoning or ""):
        raise ApiError(
            400,
            "unsupported_field",
            f"this model's answers have channels, which leave no room for this {field}; give none",
            field,
        )


def _sampling(
    body: ChatBody,
    defaults: Mapping[str, float],
    keeps_special_tokens: bool,
    forced: StructuredOutputs | None,
) -> SamplingParams:
    changes: dict[str, Any] = {
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    if forced is not None:
        changes["structured_outputs"] = forced
    if keeps_special_tokens:
        # Markers of tool calls and reasoning are special tokens; the parser removes the others.
        changes["skip_special_tokens"] = False
    return body.sampling(defaults, **changes)

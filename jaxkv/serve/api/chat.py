"""`/v1/chat/completions`: answers to conversations."""

import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxkv.serve.api.chat_body import ChatBody
from jaxkv.serve.api.chat_turn import ChatTurn, TurnDelta, open_turn
from jaxkv.serve.api.token_logprobs import chat_logprobs, prompt_logprobs
from jaxkv.serve.api.usage import reply_schema, usage_json
from jaxkv.serve.http.operation import Operation
from jaxkv.serve.http.replies import DONE, Answer, EventStream, Reply, chunk
from jaxkv.serve.http.request import Request
from jaxkv.serve.http.service import Service
from jaxkv.serve.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin

Json = dict[str, Any]


async def chat_completions(service: Service, request: Request) -> Answer:
    """Answers a request."""
    turn = await open_turn(service, request, request.json())
    writer = _Writer(service, turn, request.id)
    if turn.body.stream:
        stream = EventStream(writer.stream(), service.limits.keep_alive_seconds)
        return await stream.begun()
    return Reply.json(await writer.whole())


class _Writer:
    """Writes an answer, whole or as a stream."""

    def __init__(self, service: Service, turn: ChatTurn, request_id: str) -> None:
        self._service = service
        self._turn = turn
        self._id = f"chatcmpl-{request_id}"
        self._created = service.now()
        self._samples = [_Sample() for _ in range(turn.work.params.n)]

    async def whole(self) -> Json:
        """Returns the reply when all samples have ended."""
        async with contextlib.aclosing(self._turn.deltas()) as deltas:
            async for batch in deltas:
                for new in batch:
                    self._samples[new.sample].add(new, self._logprobs(new))
        reply = {
            **self._base("chat.completion"),
            "choices": [
                self._with_ids(each.choice(index), each.ids)
                for index, each in enumerate(self._samples)
            ],
            "usage": self._usage(),
            **self._prompt_ids(),
        }
        if (scores := self._turn.work.generations[0].prompt_logprobs) is not None:
            ids, top = self._turn.work.prompts[0], self._turn.body.prompt_logprobs or 0
            reply["prompt_logprobs"] = prompt_logprobs(ids, scores, top, self._service.token_texts)
        return reply

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yields the events of a stream. The first one of each sample has its role, the last one its finish reason."""
        head = msgspec.json.encode(self._base("chat.completion.chunk"))[:-1]
        options = self._turn.body.stream_options
        with_usage = options is not None and options.include_usage
        async with contextlib.aclosing(self._turn.deltas()) as deltas:
            async for batch in deltas:
                tail: Json = {"usage": None} if with_usage else {}
                if options is not None and options.continuous_usage_stats:
                    tail["usage"] = self._usage()
                chunks = [made for new in batch for made in self._chunks(new)]
                if chunks:
                    yield b"".join(chunk(head, {**made, **tail}) for made in chunks)
        last = chunk(head, {"choices": [], "usage": self._usage()}) if with_usage else b""
        yield last + DONE

    def _chunks(self, new: TurnDelta) -> list[Json]:
        """Returns the chunks that new events need, without what all chunks have."""
        sample, logprobs = self._samples[new.sample], self._logprobs(new)
        chunks = []
        if not sample.begun:
            sample.begun = True
            role = _choice(new.sample, {"role": "assistant", "content": ""})
            chunks.append({"choices": [role], **self._prompt_ids()})
        delta = sample.delta(new.events)
        ids = new.delta.ids if self._turn.body.return_token_ids else ()
        if delta or logprobs is not None or ids:
            # A chunk of held-back text alone has its tokens.
            choice = _choice(new.sample, delta or {"content": ""}, logprobs)
            chunks.append({"choices": [self._with_ids(choice, ids)]})
        if new.finish_reason is not None:
            end = _choice(new.sample, {}, None, new.finish_reason)
            chunks.append({"choices": [end | {"stop_reason": new.delta.stop_reason}]})
        return chunks

    def _with_ids(self, choice: Json, ids: Sequence[int]) -> Json:
        """Returns a choice with its token ids, if they were asked for."""
        if self._turn.body.return_token_ids:
            choice["token_ids"] = list(ids)
        return choice

    def _prompt_ids(self) -> Json:
        """Returns the field with the prompt's token ids, if they were asked for; where vLLM has it."""
        if not self._turn.body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._turn.work.prompts[0])}

    def _base(self, kind: str) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._turn.body.model,
        }

    def _usage(self) -> Json:
        return usage_json(self._turn.usage, self._turn.reasoning_tokens)

    def _logprobs(self, new: TurnDelta) -> Json | None:
        body, delta = self._turn.body, new.delta
        if not body.logprobs or delta.logprobs is None or not delta.ids:
            return None
        texts = self._service.token_texts
        return chat_logprobs(delta.ids, delta.logprobs, body.top_logprobs or 0, texts)


@dataclass
class _Sample:
    """One sample's answer so far.

    Attributes:
        begun: whether a stream has its role.
        ids: its tokens.
        content, reasoning: their pieces.
        calls: its tool calls, as OpenAI writes them.
        logprobs: log-probabilities of its tokens; `None` if they were not asked for.
        finish_reason, stop_reason: of its last delta.
    """

    begun: bool = False
    ids: list[int] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, new: TurnDelta, logprobs: Json | None) -> None:
        """Adds new events."""
        delta = self.delta(new.events)
        self.ids += new.delta.ids
        self.content.append(delta.get("content", ""))
        self.reasoning.append(delta.get("reasoning", ""))
        for entry in delta.get("tool_calls", ()):
            arguments = entry["function"]["arguments"]
            if "id" in entry:
                self.calls.append(
                    {
                        "id": entry["id"],
                        "type": "function",
                        "function": {"name": entry["function"]["name"], "arguments": [arguments]},
                    }
                )
            else:
                self.calls[entry["index"]]["function"]["arguments"].append(arguments)
        if logprobs is not None:
            self.logprobs = (self.logprobs or []) + logprobs["content"]
        if new.finish_reason is not None:
            self.finish_reason, self.stop_reason = new.finish_reason, new.delta.stop_reason

    def delta(self, events: Sequence[Event]) -> Json:
        """Returns events as the delta of one chunk; empty without events."""
        found: Json = {}
        calls: dict[int, Json] = {}
        for event in events:
            match event:
                case Content(text):
                    found["content"] = found.get("content", "") + text
                case Reasoning(text):
                    found["reasoning"] = found.get("reasoning", "") + text
                case ToolCallBegin(index, name):
                    calls[index] = {
                        "index": index,
                        "id": f"call_{secrets.token_hex(12)}",
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                case ToolCallArguments(index, text):
                    entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    entry["function"]["arguments"] += text
        if "reasoning" in found:
            # The older name of the same.
            found["reasoning_content"] = found["reasoning"]
        if calls:
            found["tool_calls"] = list(calls.values())
        return found

    def choice(self, index: int) -> Json:
        """Returns the whole choice."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        message: Json = {
            "role": "assistant",
            "content": content if content or not self.calls else None,
            "refusal": None,
        }
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self.calls:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": "".join(call["function"]["arguments"]),
                    },
                }
                for call in self.calls
            ]
        logprobs = None
        if self.logprobs is not None:
            logprobs = {"content": self.logprobs, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


def _choice(
    index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None
) -> Json:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


OPERATION = Operation(
    path="/v1/chat/completions",
    method="POST",
    handler=chat_completions,
    summary="Answers a conversation",
    body=ChatBody,
    reply=reply_schema(
        "chat.completion",
        {
            "type": "object",
            "required": ["index", "message", "logprobs", "finish_reason"],
            "properties": {
                "index": {"type": "integer"},
                "message": {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {
                        "role": {"const": "assistant"},
                        "content": {"type": ["string", "null"]},
                    },
                },
                "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
            },
        },
    ),
    errors=(400, 401, 404, 413, 415, 429, 503, 504),
)

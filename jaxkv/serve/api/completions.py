"""`/v1/completions`: texts that continue prompts."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxkv.config.sampling import MAX_LOGPROBS
from jaxkv.serve.api.sampling_fields import SamplingFields, without_refused
from jaxkv.serve.api.state import check_model
from jaxkv.serve.api.text_offsets import TextOffsets, echo_offsets, unfinished_bytes
from jaxkv.serve.api.token_logprobs import completion_logprobs, prompt_logprobs
from jaxkv.serve.api.usage import reply_schema, usage_json
from jaxkv.serve.generation import Delta
from jaxkv.serve.http.errors import bad_request
from jaxkv.serve.http.json_body import convert
from jaxkv.serve.http.operation import Operation
from jaxkv.serve.http.replies import DONE, Answer, EventStream, Reply, chunk
from jaxkv.serve.http.request import Request
from jaxkv.serve.http.service import Service
from jaxkv.serve.http.work import Work, check_prompts
from jaxkv.text.detokenize import REPLACEMENT

Json = dict[str, Any]
_Ids = Annotated[list[int], Meta(min_length=1)]


class CompletionBody(SamplingFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The body of a request."""

    prompt: Annotated[
        str | list[int | str | _Ids],
        Meta(description="a text, token ids, or a list of either"),
    ]
    echo: Annotated[bool, Meta(description="the text begins with the prompt")] | None = None
    logprobs: (
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description="likeliest tokens at each place")]
        | None
    ) = None
    add_special_tokens: (
        Annotated[bool, Meta(description="the prompt begins with the tokenizer's special tokens")]
        | None
    ) = None


async def completions(service: Service, request: Request) -> Answer:
    """Answers a request."""
    body = convert(without_refused(request.json()), CompletionBody)
    adapter = check_model(service, body.model)
    body.check_stream_options()
    prompts = _prompts(body.prompt)
    check_prompts(service, len(prompts), body.n or 1)
    params = body.sampling(
        service.facts.sampling_defaults,
        logprobs=body.logprobs,
        prompt_logprobs=_scored(body),
        lora=adapter,
    )
    special = body.add_special_tokens is not False
    ids = [
        await service.encode(prompt, add_special=special) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    work = Work(
        service,
        ids,
        params,
        priority=body.priority or 0,
        salt=request.salt(body.cache_salt),
        request_id=request.id,
        demanding=body.demanding,
    )
    writer = _Writer(service, body, request.id, work, await _echoes(service, body, prompts, ids))
    if body.stream:
        stream = EventStream(writer.stream(), service.limits.keep_alive_seconds)
        return await stream.begun()
    return Reply.json(await writer.whole())


def _prompts(given: str | list[int | str | list[int]]) -> Sequence[str | list[int]]:
    """Returns a list of texts and lists of token ids.

    Raises:
        ApiError: 400 for an empty prompt, or ids beside other prompts.
    """
    if isinstance(given, str):
        given = [given]
    if set(map(type, given)) == {int}:
        return [given]  # pyright: ignore[reportReturnType] - nothing but ids
    ids = [each for each in given if isinstance(each, int)]
    others = [each for each in given if not isinstance(each, int)]
    if ids and others:
        raise bad_request("prompt has token ids beside texts or lists; give one kind", "prompt")
    prompts: Sequence[str | list[int]] = [ids] if ids else others
    if not prompts or not all(prompts):
        raise bad_request("prompt is empty; it needs at least one token", "prompt")
    return prompts


def _scored(body: CompletionBody) -> int | None:
    """Returns how many likeliest tokens of each place of the prompt are needed; `None` for no scores."""
    echoed = body.logprobs if body.echo else None
    if echoed is None:
        return body.prompt_logprobs
    return max(echoed, body.prompt_logprobs or 0)


@dataclass(frozen=True)
class _Echo:
    """The text that the choices of one prompt begin with.

    Attributes:
        text: the prompt's text.
        offsets: where its tokens begin in it; empty unless their log-probabilities were asked for.
        complete: number of its complete characters, likewise.
    """

    text: str = ""
    offsets: Sequence[int] = ()
    complete: int = 0


async def _echoes(
    service: Service,
    body: CompletionBody,
    prompts: Sequence[str | list[int]],
    ids: Sequence[Sequence[int]],
) -> list[_Echo]:
    """Returns what the choices of each prompt begin with."""
    if not body.echo:
        return [_Echo()] * len(prompts)
    echoes = []
    for prompt, tokens in zip(prompts, ids, strict=True):
        text = prompt if isinstance(prompt, str) else await service.decode(prompt)
        offsets, complete = [], 0
        if body.logprobs is not None:
            # In a thread: a thousand tokens take several milliseconds.
            offsets, complete = await service.in_thread(
                partial(echo_offsets, service.tokenizer, service.token_texts, tokens, text),
                "prompt",
            )
        echoes.append(_Echo(text, offsets, complete))
    return echoes


_NEWS = ("text", "finish_reason", "logprobs", "token_ids", "prompt_logprobs")
"""Fields of a choice, any of which is worth an event. A token may have no text yet, as a part of a character."""

_CONTEXT = 16
"""Tokens before an incomplete character that are decoded with it."""


@dataclass
class _Choice:
    """One text so far.

    Attributes:
        begun: whether its first part was written.
        held: number of last characters of the echo that the completion may still complete.
        ids: its tokens while characters are held.
        offsets: where its tokens begin; `None` before the first log-probabilities.
    """

    begun: bool = False
    held: int = 0
    ids: list[int] = field(default_factory=list)
    offsets: TextOffsets | None = None


class _Writer:
    """Writes a request's texts, whole or as a stream."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        request_id: str,
        work: Work,
        echoes: list[_Echo],
    ) -> None:
        self._service = service
        self._body = body
        self._work = work
        self._echoes = echoes
        self._samples = body.n or 1
        self._choices = [_Choice() for _ in range(self._samples * len(echoes))]
        self._base = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": service.now(),
            "model": body.model,
        }

    async def whole(self) -> Json:
        """Returns the reply when all texts have ended."""
        parts: list[list[Json]] = [[] for _ in self._choices]
        async with contextlib.aclosing(self._work.deltas()) as deltas:
            async for batch in deltas:
                for prompt, delta in batch:
                    parts[self._index(prompt, delta)].append(self._choice(prompt, delta))
        usage = usage_json(self._work.usage)
        return {**self._base, "choices": [_joined(each) for each in parts], "usage": usage}

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yields the events of a stream."""
        head = msgspec.json.encode(self._base)[:-1]
        options = self._body.stream_options
        async with contextlib.aclosing(self._work.deltas()) as deltas:
            async for batch in deltas:
                choices = [self._choice(prompt, delta) for prompt, delta in batch]
                tail: Json = {}
                if options is not None and options.continuous_usage_stats:
                    tail["usage"] = usage_json(self._work.usage)
                elif options is not None and options.include_usage:
                    tail["usage"] = None
                yield b"".join(
                    chunk(head, {"choices": [choice], **tail})
                    for choice in choices
                    if any(choice.get(name) for name in _NEWS)
                )
        last = b""
        if options is not None and options.include_usage:
            last = chunk(head, {"choices": [], "usage": usage_json(self._work.usage)})
        yield last + DONE

    def _index(self, prompt: int, delta: Delta) -> int:
        return prompt * self._samples + delta.sample

    def _choice(self, prompt: int, delta: Delta) -> Json:
        """Returns a choice with new text."""
        index = self._index(prompt, delta)
        choice = self._choices[index]
        first = not choice.begun
        text = self._echo(prompt, delta, choice) + delta.text
        choice.begun = True
        logprobs = self._echoed_logprobs(prompt) if first else None
        found: Json = {
            "index": index,
            "text": text,
            "logprobs": _chained(logprobs, self._logprobs(prompt, delta, choice)),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if first and self._body.prompt_logprobs is not None:
            scores = self._work.generations[prompt].prompt_logprobs or ()
            ids, top = self._work.prompts[prompt], self._body.prompt_logprobs
            found["prompt_logprobs"] = prompt_logprobs(ids, scores, top, self._service.token_texts)
        if self._body.return_token_ids:
            found["token_ids"] = list(delta.ids)
            found["prompt_token_ids"] = list(self._work.prompts[prompt]) if first else None
        return found

    def _echo(self, prompt: int, delta: Delta, choice: _Choice) -> str:
        """Returns what comes of the echo before the text of a delta.

        A character that the prompt leaves incomplete belongs to the completion's text, unless it stays incomplete. So
        the echo of its part waits for the first text of the completion.
        """
        text = ""
        if not choice.begun:
            text = self._echoes[prompt].text
            if text and unfinished_bytes(self._service.token_texts, self._work.prompts[prompt]):
                choice.held = len(text) - len(text.rstrip(REPLACEMENT))
                text = text.rstrip(REPLACEMENT)
        if choice.held:
            choice.ids += delta.ids
            if delta.text or delta.finish_reason:
                text += REPLACEMENT * self._broken(prompt, choice)
                choice.held = 0
        return text

    def _broken(self, prompt: int, choice: _Choice) -> int:
        """Returns how many of the characters that were held back stay incomplete."""
        tokenizer, skip = self._service.tokenizer, self._work.params.skip_special_tokens
        assert tokenizer is not None
        # Each held character is at most three bytes, and so at most three tokens.
        ids = self._work.prompts[prompt][-(3 * choice.held + _CONTEXT) :]
        before = tokenizer.decode(ids, skip_special_tokens=skip)
        both = tokenizer.decode([*ids, *choice.ids], skip_special_tokens=skip)
        text = both[len(before) - choice.held :]
        return min(choice.held, len(text) - len(text.lstrip(REPLACEMENT)))

    def _echoed_logprobs(self, prompt: int) -> Json | None:
        """Returns the log-probabilities of the prompt that a choice begins with, if they were asked for."""
        scores = self._work.generations[prompt].prompt_logprobs
        if not self._body.echo or self._body.logprobs is None or scores is None:
            return None
        ids, texts = self._work.prompts[prompt], self._service.token_texts
        offsets = self._echoes[prompt].offsets
        return completion_logprobs(ids, scores, self._body.logprobs, texts, offsets)

    def _logprobs(self, prompt: int, delta: Delta, choice: _Choice) -> Json | None:
        if self._body.logprobs is None or delta.logprobs is None or not delta.ids:
            return None
        if choice.offsets is None:
            choice.offsets = self._offsets(prompt)
        offsets = [choice.offsets.push(token) for token in delta.ids]
        texts = self._service.token_texts
        return completion_logprobs(delta.ids, delta.logprobs, self._body.logprobs, texts, offsets)

    def _offsets(self, prompt: int) -> TextOffsets:
        """Returns the offsets of a prompt's completion, before its first token."""
        ids, echo = self._work.prompts[prompt], self._echoes[prompt]
        start = end = len(echo.text)
        if unfinished_bytes(self._service.token_texts, ids):
            start = echo.complete
        return TextOffsets(
            self._service.tokenizer,
            self._service.token_texts,
            ids,
            skip_special_tokens=self._work.params.skip_special_tokens,
            start=start,
            end=end,
        )


def _joined(parts: Sequence[Json]) -> Json:
    """Returns the parts of one choice as one."""
    whole = dict(parts[-1])
    whole["text"] = "".join(part["text"] for part in parts)
    whole["logprobs"] = _chained(*(part["logprobs"] for part in parts))
    if "prompt_logprobs" in parts[0]:
        whole["prompt_logprobs"] = parts[0]["prompt_logprobs"]
    if "token_ids" in whole:
        whole["token_ids"] = [token for part in parts for token in part["token_ids"]]
        whole["prompt_token_ids"] = parts[0]["prompt_token_ids"]
    return whole


def _chained(*found: Json | None) -> Json | None:
    """Returns the log-probabilities of successive tokens as one."""
    listed = [each for each in found if each is not None]
    if not listed:
        return None
    return {name: [value for each in listed for value in each[name]] for name in listed[0]}


OPERATION = Operation(
    path="/v1/completions",
    method="POST",
    handler=completions,
    summary="Continues prompts",
    body=CompletionBody,
    reply=reply_schema(
        "text_completion",
        {
            "type": "object",
            "required": ["index", "text", "logprobs", "finish_reason"],
            "properties": {
                "index": {"type": "integer"},
                "text": {"type": "string"},
                "finish_reason": {"enum": ["stop", "length"]},
            },
        },
    ),
    errors=(400, 401, 404, 413, 415, 429, 503, 504),
)

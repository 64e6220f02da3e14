"""`Generation`: the texts of one call's samples, with their stop strings, finish reasons and token counts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import msgspec

from jaxkv.config.sampling import SamplingParams
from jaxkv.serve.engine_client import (
    Call,
    EngineBusy,
    EngineClient,
    EngineLost,
    RequestRefused,
    SlowReader,
)
from jaxkv.serve.replicas import ReplicaClient
from jaxkv.serve.wire import GENERATION_FAILED, Tokens
from jaxkv.text.bad_words import forbid_words
from jaxkv.text.text_stream import TextStream
from jaxkv.text.tokenizer import Tokenizer


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New text of one sample.

    Attributes:
        sample: index of the sample.
        text: the new text; empty while a character or a possible stop string is incomplete.
        ids: the new token ids.
        logprobs: per id, token id -> natural log-probability; `None` unless requested.
        finish_reason: "stop", "length", "abort" or "error" on the last delta of a sample, otherwise `None`.
        stop_reason: the stop string or the id of `stop_token_ids` that ended the sample; `None` for the model's end ids
            and for other reasons.
        error: the message if `finish_reason` is "error". It may name internals: for the log, not for clients.
        code: what clients are told of an error, see `jaxkv.serve.wire.Ended`.
    """

    sample: int
    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, float], ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    code: str = GENERATION_FAILED


@dataclass
class Counts:
    """Token counts and times of one call so far.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: prompt tokens that the prefix cache held for the first sample that ended.
        output_tokens: generated tokens of all samples.
        preemptions: how often a sample lost its pages.
        arrived, first_token, finished: seconds of `time.monotonic`; `None` before the event.
        queue_seconds: what the engine said of the first sample that ended.
        reasons: the finish reason of each sample that has ended, in the order of their ends. Samples that an abort or
            an error of the engine ended are "abort" or "error" here, though no delta of theirs says so.
        outputs: generated tokens of each of them.
    """

    prompt_tokens: int
    arrived: float
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    first_token: float | None = None
    finished: float | None = None
    queue_seconds: float | None = None
    reasons: list[str] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


@runtime_checkable
class CallWatcher(Protocol):
    """Receives the tokens of a call and its end; `jaxkv.serve.metrics.Recorder` implements it."""

    def first_token(self, counts: Counts) -> None:
        """The first token of the call has come."""
        ...

    def tokens(self, count: int, gap: float | None, now: float) -> None:
        """A sample got `count` tokens now, `gap` seconds after those before; `None` for its first ones.

        Args:
            count: number of tokens.
            gap: seconds.
            now: seconds of `time.monotonic`.
        """
        ...

    def ended(self, counts: Counts) -> None:
        """All samples of the call have ended; called once."""
        ...


class _Sample:
    """The text of one sample."""

    def __init__(self, index: int, stream: TextStream | None, params: SamplingParams) -> None:
        self.index = index
        self.ended = False
        self.last_tokens: float | None = None
        self.generated = 0
        self._stream = stream
        self._params = params

    def take(self, tokens: Tokens) -> Delta:
        """Returns the delta of new tokens. Tokens after a stop string are dropped.

        Raises:
            ValueError: an id has no text.
        """
        pieces, used, stop = [], 0, None
        end = tokens.ended
        for token in tokens.ids:
            used += 1
            text, met = self._push(token)
            pieces.append(text)
            if met:
                stop = self._stop_string()
                break
        if stop is None and end is not None:
            text, met = self._finish(may_stop=end.reason in ("stop", "length"))
            pieces.append(text)
            stop = self._stop_string() if met else None
        reason = None if end is None else end.reason
        stop_reason: str | int | None = None
        if stop is not None:
            reason, stop_reason = "stop", stop
        elif reason == "stop" and tokens.ids and tokens.ids[-1] in self._params.stop_token_ids:
            stop_reason = tokens.ids[-1]
        self.ended = reason is not None
        return Delta(
            sample=self.index,
            text="".join(pieces),
            ids=tuple(tokens.ids[:used]),
            logprobs=None if tokens.logprobs is None else tuple(tokens.logprobs[:used]),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=end.error if end is not None and reason == "error" else None,
            code=GENERATION_FAILED if end is None else end.code,
        )

    def _push(self, token: int) -> tuple[str, bool]:
        self.generated += 1
        if self._stream is None:
            return "", False
        return self._stream.push(token, may_stop=self.generated >= self._params.min_tokens)

    def _finish(self, *, may_stop: bool) -> tuple[str, bool]:
        if self._stream is None:
            return "", False
        may_stop = may_stop and self.generated >= self._params.min_tokens
        return self._stream.finish(may_stop=may_stop)

    def _stop_string(self) -> str | None:
        return None if self._stream is None else self._stream.stop_string


class Generation:
    """One prompt in the engine, as text.

    Args:
        call: its samples in the engine.
        tokenizer: decodes; `None` gives deltas without text.
        prompt: token ids of the prompt.
        params: the user's sampling parameters, with stop strings.
        watcher: receives its tokens and its end.

    Attributes:
        counts: token counts and times so far.
    """

    def __init__(
        self,
        call: Call,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        params: SamplingParams,
        watcher: CallWatcher | None = None,
    ) -> None:
        self.counts = Counts(prompt_tokens=len(prompt), arrived=time.monotonic())
        self._call = call
        self._watcher = watcher
        self._samples = [
            _Sample(index, tokenizer and TextStream(tokenizer, prompt, params), params)
            for index in range(params.n)
        ]

    @property
    def prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        """Per token of the prompt, token id -> natural log-probability; there with the first deltas, if asked for."""
        return self._call.prompt_logprobs

    async def deltas(self) -> list[Delta]:
        """Waits for tokens; returns a delta for each sample with new text or an end. Empty when all have ended.

        All that has arrived since the last call comes at once.

        Raises:
            RequestRefused, EngineBusy, SlowReader, EngineLost: see `Call.arrivals`.
        """
        merged: dict[int, Tokens] = {}
        try:
            arrived = await self._call.arrivals()
        except (RequestRefused, EngineBusy, SlowReader, EngineLost):
            self._end_open("error")
            raise
        for tokens in arrived:
            before = merged.get(tokens.sample)
            merged[tokens.sample] = tokens if before is None else _joined(before, tokens)
        return [self._take(tokens) for tokens in merged.values()]

    def abort(self) -> None:
        """Ends all samples and frees their pages within a step; a second call does nothing."""
        self._call.abort()
        self._end_open("abort")

    def _take(self, tokens: Tokens) -> Delta:
        sample, now = self._samples[tokens.sample], time.monotonic()
        try:
            delta = sample.take(tokens)
        except ValueError as error:
            delta = Delta(
                sample=tokens.sample, text="", finish_reason="error", error=f"no text: {error}"
            )
            sample.ended = True
        if delta.finish_reason is not None and tokens.ended is None:
            self._call.abort(tokens.sample)
        self._count(sample, delta, tokens, now)
        return delta

    def _count(self, sample: _Sample, delta: Delta, tokens: Tokens, now: float) -> None:
        counts, watcher = self.counts, self._watcher
        counts.output_tokens += len(delta.ids)
        if delta.ids:
            if counts.first_token is None:
                counts.first_token = now
                if watcher is not None:
                    watcher.first_token(counts)
            if watcher is not None:
                before = sample.last_tokens
                gap = None if before is None else now - before
                watcher.tokens(len(delta.ids), gap, now)
            sample.last_tokens = now
        if (end := tokens.ended) is not None:
            counts.preemptions += end.preemptions
            if counts.queue_seconds is None:
                counts.cached_tokens, counts.queue_seconds = end.cached_tokens, end.queue_seconds
        if delta.finish_reason is not None:
            self._end([sample], delta.finish_reason, now)

    def _end_open(self, reason: str) -> None:
        """Counts the samples without an end as ended; a second call does nothing."""
        left = [sample for sample in self._samples if not sample.ended]
        for sample in left:
            sample.ended = True
        if left:
            self._end(left, reason, time.monotonic())

    def _end(self, samples: Sequence[_Sample], reason: str, now: float) -> None:
        counts = self.counts
        counts.finished = now
        counts.reasons += [reason] * len(samples)
        counts.outputs += [sample.generated for sample in samples]
        if self._watcher is not None and len(counts.reasons) == len(self._samples):
            self._watcher.ended(counts)


def generate(
    client: EngineClient | ReplicaClient,
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    priority: int = 0,
    salt: bytes | None = None,
    watcher: CallWatcher | None = None,
) -> Generation:
    """Begins one prompt in the engine; returns its texts.

    Args:
        client: the engine process, or those of several replicas.
        tokenizer: the tokenizer of the model; `None` if it has none.
        prompt: token ids of the prompt.
        params: sampling parameters.
        priority: lower numbers are served first.
        salt: only requests of the same salt share cached pages.
        watcher: receives the call's tokens and its end.

    Raises:
        ValueError: stop strings or `bad_words` that this tokenizer cannot serve.
        EngineLost: the engine process has ended.
    """
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer, which this model directory lacks")
    sent = forbid_words(params, tokenizer)
    if sent.stop:
        sent = replace(sent, stop=())
    call = client.submit(prompt, sent, priority=priority, salt=salt)
    return Generation(call, tokenizer, prompt, params, watcher)


def _joined(first: Tokens, second: Tokens) -> Tokens:
    """Returns two messages of one sample as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return Tokens(first.call, first.sample, [*first.ids, *second.ids], logprobs, second.ended)

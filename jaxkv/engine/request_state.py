"""The state of one request: its tokens, its pages, its status and what is in flight."""

import math
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from jaxkv.cache.page_allocator import SequenceView
from jaxkv.cache.prefix.index import PageKeys
from jaxkv.engine.request import Piece, Request
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import features_for
from jaxkv.structured.generated_tokens import GeneratedTokens
from jaxkv.structured.grammar import Grammar, TokenConstraint
from jaxkv.text.text_stream import TextStream
from jaxkv.text.tokenizer import Tokenizer

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"

ORDER = attrgetter("order")
"""Sort key: lower priority number first, then earlier arrival."""


@dataclass(eq=False, kw_only=True, slots=True, weakref_slot=True)
class RequestState:
    """The state of one request.

    The host may be a step behind the device. The tokens of a request, as half-open ranges:

        [0, collected)               their steps were read by the host, without an error
        [collected, computed)        their steps are in flight; with `unread_drafts`, fewer may be
        [computed, known + pending)  later steps compute them
        known = len(tokens): the prompt and the generated tokens that the host has read
        pending: tokens sampled on the device that the host has not read

    `computed`, `writable` and `reserved` are those of its pages, see `SequencePages`; 0 while it holds none.

    Attributes:
        request: prompt and parameters.
        number: its number in the page allocator; later requests have larger numbers.
        tokens: ids of the prompt and of the generated tokens that the host has read.
        status: `WAITING`, `RUNNING` or `FINISHED`.
        pages: read-only view of its pages and states; `None` while it waits.
        collected: number of its tokens whose steps the host has read.
        pending: number of its tokens that are sampled and that the host has not read; while drafts are verified, the
            most that can be.
        unread_drafts: number of its drafts in flight. So many of the tokens that count as computed and pending may be
            taken back.
        drafts_on_device: the device has drafts of the tokens behind its last one.
        epoch: incremented when its results in flight become invalid; rows of an older epoch are dropped.
        other_samples: samples of the same prompt that start from its pages.
        first_sample: the sample of the same prompt that this one waits for.
        keys: keys of its pages in the prefix index.
        tainted: some of its logits were not finite, so its pages must not be shared.
        publishes_at: value of `collected` at which it next publishes to the prefix index; 0 if it never has.
        cached: prompt tokens found in the prefix index at its first admission; `None` before.
        shared: tokens in pages that it took over from another sample of the same prompt.
        preemptions: how often it lost its pages and was computed again.
        fetched: a swap-in of its prefix was tried since it began to wait.
        retried: it was requeued once after a failure of its own, or of the program that samples.
        reason: why it ended; see `SampleOutput`.
        error: the exception that ended it, if one did.
        logprobs: per generated token, if requested.
        prompt_logprobs: per token of the prompt, if requested; of the first sample alone.
        routed_experts: the experts chosen for its tokens, `[tokens, layers, top_k]` or longer, on the device or the
            host; `None` if the cache keeps none, or if it did not end by a sampled token.
        stream: incremental detokenizer; `None` if the request is not streamed and has no stop strings.
        text: output of `stream` so far.
        pieces: pieces that the user has not read yet; `None` if the request is not streamed.
        constraint: state of its grammar, a function of the generated tokens; `None` without one.
        version_changes: (number of a generated token, version of the parameters that sampled it), for the first token
            and for each whose version differs from that of the token before.
        features: sampling features that a program needs to serve it.
        prompt_tokens: length of the prompt.
        longest: length of the prompt plus `max_tokens`.
        arrived, admitted, started, ended: seconds on the engine's clock: when it was queued, was first admitted, gave
            its first token, ended.
    """

    request: Request
    number: int
    tokens: list[int]
    status: str = WAITING
    pages: SequenceView | None = None
    collected: int = 0
    pending: int = 0
    unread_drafts: int = 0
    drafts_on_device: bool = False
    epoch: int = 0
    other_samples: "list[RequestState]" = field(default_factory=list)
    first_sample: "RequestState | None" = None
    keys: PageKeys | None = None
    tainted: bool = False
    publishes_at: int = 0
    cached: int | None = None
    shared: int = 0
    preemptions: int = 0
    fetched: bool = False
    retried: bool = False
    reason: str | None = None
    error: Exception | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    routed_experts: Any = None
    stream: TextStream | None = None
    text: str = ""
    pieces: deque[Piece] | None = None
    constraint: TokenConstraint | None = None
    version_changes: list[tuple[int, WeightVersion]] = field(default_factory=list)
    arrived: float = 0.0
    admitted: float | None = None
    started: float | None = None
    ended: float | None = None
    features: Features = field(init=False)
    prompt_tokens: int = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        """Computes the features and lengths once, since every step reads them."""
        self.features = features_for(self.request.params)
        self.prompt_tokens = len(self.request.prompt)
        self.longest = self.prompt_tokens + self.request.max_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Position in the queues: by priority number, then by arrival."""
        return self.request.priority, self.number

    @property
    def computed(self) -> int:
        """Tokens whose keys, values and states were computed by dispatched steps."""
        return 0 if self.pages is None else self.pages.computed

    @property
    def writable(self) -> int:
        """Tokens that its pages hold in every group; with sliding windows, fewer than `reserved`."""
        return 0 if self.pages is None else self.pages.writable

    @property
    def reserved(self) -> int:
        """Tokens that its pages hold in groups without a window."""
        return 0 if self.pages is None else self.pages.reserved

    @property
    def generated(self) -> int:
        """Generated tokens that the host has read."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def token_ids(self) -> list[int]:
        """The generated ids."""
        return self.tokens[self.prompt_tokens :]

    @property
    def answer(self) -> GeneratedTokens:
        """The generated ids, not copied."""
        return GeneratedTokens(self.tokens, self.prompt_tokens)

    @property
    def weight_versions(self) -> list[WeightVersion]:
        """Per generated token, the version of the parameters that sampled it."""
        versions: list[WeightVersion] = []
        for begin, version in reversed(self.version_changes):
            versions = [version] * (self.generated - begin - len(versions)) + versions
        return versions

    @property
    def goal(self) -> int:
        """Tokens to compute before the next token can be sampled, or before the other samples can start."""
        return self.prompt_tokens - 1 if self.other_samples else len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens left to compute; 0 if the request can only wait."""
        known = len(self.tokens) + self.pending
        if known >= self.longest:
            return 0
        return (self.prompt_tokens - 1 if self.other_samples else known) - self.computed

    @property
    def is_computed(self) -> bool:
        """Whether all its tokens are computed already, so that a step only samples the next token."""
        known = len(self.tokens) + self.pending
        return self.computed == known < self.longest and not self.other_samples

    @property
    def has_mask(self) -> bool:
        """Whether the mask of the token after those in flight is known, or it needs none."""
        if self.constraint is None:
            return True
        return not self.pending and self.constraint.is_ready(self.generated)

    def experts_on_host(self) -> np.ndarray | None:
        """Returns `routed_experts` of all its tokens but the last, int16, and keeps them on the host alone."""
        if self.routed_experts is not None:
            # A copy, because the padded array may be much longer.
            self.routed_experts = np.asarray(self.routed_experts)[: len(self.tokens) - 1].copy()
        return self.routed_experts

    # Events in the life of a request, in order.

    def start(self, pages: SequenceView) -> None:
        """Starts from pages whose computed tokens were found in the prefix index."""
        self.pages = pages
        self.collected = pages.computed

    def start_from(self, first: "RequestState", pages: SequenceView) -> None:
        """Starts from the pages of another sample of the same prompt."""
        self.start(pages)
        self.shared, self.cached = self.collected, 0
        self.keys = first.keys and first.keys.copy()
        self.admitted = first.admitted

    def accept(self, token: int, logprobs: dict[int, float] | None) -> None:
        """Appends a generated token that the host has read, and sets `reason` if it is the last.

        Raises:
            Exception: any error of the tokenizer or of the grammar.
        """
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.tokens.append(token)
        # Most tokens end nothing, which is decided without a further call.
        request = self.request
        may_end = token in request.stop_ids or len(self.tokens) == self.longest
        if may_end or request.given or self.constraint is not None:
            self.reason = self.stop_reason()
        if self.stream is None and self.pieces is None:
            return
        text = self._push(token)
        self.text += text
        if self.pieces is not None:
            self.pieces.append(
                Piece(
                    text=text,
                    token_id=token,
                    finish_reason=self.reason,
                    logprobs=logprobs,
                    weight_version=self.version_changes[-1][1] if self.version_changes else None,
                )
            )

    def stop_reason(self) -> str | None:
        """Returns the `finish_reason` if the last token ends the request, else `None`.

        Raises:
            RuntimeError: the request's grammar has exceeded a limit.
        """
        if self.generated < len(self.request.given):
            return None
        if self.tokens[-1] in self.request.stop_ids and self.generated:
            return "stop"
        if self.constraint is not None and self.constraint.ends(self.answer):
            return "stop"
        return "length" if self.request.given or len(self.tokens) == self.longest else None

    def end(self, reason: str) -> None:
        """Ends the request without a further token; flushes the remaining text to `text` and `pieces`."""
        self.reason = reason
        text = ""
        if self.stream is not None:
            text, _ = self.stream.finish(may_stop=False)
            self.text += text
        if self.pieces is not None:
            self.pieces.append(Piece(text=text, token_id=None, finish_reason=reason))

    def restart(self) -> None:
        """Resets all but its tokens after its pages were released; rows in flight are dropped."""
        self.pages = None
        self.collected = self.pending = self.unread_drafts = self.publishes_at = 0
        self.tainted = self.fetched = self.drafts_on_device = False
        self.epoch += 1

    def forget_admission(self) -> None:
        """Undoes `start_from` after the admission failed."""
        self.cached, self.shared, self.keys, self.admitted = None, 0, None, None

    def _push(self, token: int) -> str:
        """Returns the text that a token adds, and sets `reason` if a stop string ends the request."""
        stream = self.stream
        if stream is None:
            return ""
        may_stop = self.generated >= self.request.params.min_tokens
        text, met = stream.push(token, may_stop=may_stop)
        if not met and self.reason is not None:
            rest, met = stream.finish(may_stop=may_stop)
            text += rest
        if met:
            self.reason = "stop"
        return text


def new_request_state(
    request: Request, *, number: int, tokenizer: Tokenizer | None, streamed: bool, now: float
) -> RequestState:
    """Returns the state of a new request that waits; it detokenizes if it is streamed or has stop strings.

    Stop strings do not end a request with given tokens.
    """
    state = RequestState(request=request, number=number, tokens=list(request.prompt), arrived=now)
    if streamed:
        state.pieces = deque()
    if request.grammar is not None:
        state.constraint = _constraint_of(request, request.grammar, state.features)
    if tokenizer is not None and (streamed or (request.params.stop and not request.given)):
        state.stream = TextStream(tokenizer, request.prompt, request.params)
    return state


def _constraint_of(request: Request, grammar: Grammar, features: Features) -> TokenConstraint:
    """Returns the state of a request's grammar at the beginning of its text.

    Tokens that the grammar forces are taken without the model, so they have no log-probabilities, and the counts of
    penalties and the histories of logits processors, both on the device, would miss them. Requests with one of these
    sample them one by one.
    """
    params = request.params
    forbidden = [token for token, bias in params.logit_bias.items() if bias == -math.inf]
    outputs = params.structured_outputs
    return TokenConstraint(
        grammar,
        never=[*forbidden, *(grammar.end_ids if params.ignore_eos else ())],
        before_least=request.stop_ids,
        least=params.min_tokens,
        forces=not features.needs_admission and params.logprobs is None,
        reasoning=None if outputs is None else outputs.reasoning,
    )

"""The state of one request: what was asked, what was generated so far, and what is in flight."""

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from jaxkv.cache.page_allocator import SequenceView
from jaxkv.cache.prefix.index import PageKeys
from jaxkv.engine.request import Piece, Request
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import features_for
from jaxkv.text.text_stream import TextStream
from jaxkv.text.tokenizer import Tokenizer

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"

ORDER = attrgetter("order")
"""Sorts sequences by who comes first."""


@dataclass(eq=False, kw_only=True, slots=True)
class RequestState:
    """The progress of one request.

    The host may be a step behind the device. Its tokens, as half-open ranges:

        [0, collected)               the steps that compute them were read and found good
        [collected, computed)        the steps that compute them are in flight
        [computed, known + pending)  later steps compute them
        known = len(tokens): the prompt and the generated tokens that the host has read; `pending` more were chosen on
        the device

    `computed`, `writable` and `reserved` are those of its pages, see `SequencePages`; 0 while it holds none.

    Attributes:
        request: what was asked.
        number: its number in the page allocator; later sequences have larger ones.
        tokens: the prompt and the generated ids that the host has read.
        status: `WAITING`, `RUNNING` or `FINISHED`.
        pages: what it holds in the cache, read-only; `None` before it begins.
        collected: see above.
        pending: tokens that were chosen on the device and are not read yet.
        epoch: grows when what is under way no longer counts; rows of an older epoch are dropped.
        other_samples: of the same prompt, which start from this one's pages of it.
        first_sample: the sample of the same prompt that this one waits for.
        keys: the names of its pages in the prefix index.
        tainted: logits were not finite somewhere, so that its pages must not be shared.
        publishes_at: with so many tokens collected, it has pages to offer to the prefix index, or is new to it.
        cached: tokens of the first admission that came out of the prefix index.
        shared: tokens that another sample of the same prompt computed, from whose pages this one started.
        preemptions: how often it lost its pages and was computed again.
        fetched: the host was asked for its prefix since it began to wait.
        retried: its own part in a step ran out of memory once, and it was put off.
        reason: why it ended; see `SampleOutput`.
        error: what failed, if its own part in a step or its text did.
        logprobs: per generated token, if asked for.
        stream: makes text of its tokens; `None` if nobody reads it as it comes and no string ends it.
        text: what `stream` has made so far.
        pieces: what a user has not taken yet; `None` if nobody takes them.
        features: what a program must be able to do to choose its tokens.
        prompt_tokens, longest: of its prompt, and of the whole when `max_tokens` are generated.
        arrived, admitted, started, ended: seconds on the engine's clock: when it was added, first given pages, gave its
            first token, finished.
    """

    request: Request
    number: int
    tokens: list[int]
    status: str = WAITING
    pages: SequenceView | None = None
    collected: int = 0
    pending: int = 0
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
    stream: TextStream | None = None
    text: str = ""
    pieces: deque[Piece] | None = None
    arrived: float = 0.0
    admitted: float | None = None
    started: float | None = None
    ended: float | None = None
    features: Features = field(init=False)
    prompt_tokens: int = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        """Counts once what every step asks for."""
        self.features = features_for(self.request.params)
        self.prompt_tokens = len(self.request.prompt)
        self.longest = self.prompt_tokens + self.request.max_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: the lower priority number, then the earlier arrival."""
        return self.request.priority, self.number

    @property
    def computed(self) -> int:
        """Tokens whose keys, values and states dispatched steps compute."""
        return 0 if self.pages is None else self.pages.computed

    @property
    def writable(self) -> int:
        """Tokens that its pages hold in every group; fewer than `reserved` where layers have windows."""
        return 0 if self.pages is None else self.pages.writable

    @property
    def reserved(self) -> int:
        """Tokens that its pages hold in groups that keep all."""
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
    def goal(self) -> int:
        """Tokens that must be computed before the next one can be chosen, or before the other samples can start."""
        return self.prompt_tokens - 1 if self.other_samples else len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens that the next steps compute; 0 when there is nothing to do but wait."""
        known = len(self.tokens) + self.pending
        if known >= self.longest:
            return 0
        return (self.prompt_tokens - 1 if self.other_samples else known) - self.computed

    @property
    def is_known(self) -> bool:
        """Whether all its tokens were found in the cache, so that nothing but the next one is wanted."""
        known = len(self.tokens) + self.pending
        return self.computed == known < self.longest and not self.other_samples

    # What happens to it, in order.

    def begin(self, pages: SequenceView) -> None:
        """Starts from pages whose computed tokens came out of the prefix index."""
        self.pages = pages
        self.collected = pages.computed

    def begin_from(self, first: "RequestState", pages: SequenceView) -> None:
        """Starts from the pages of another sample of the same prompt."""
        self.begin(pages)
        self.shared, self.cached = self.collected, 0
        self.keys = first.keys and first.keys.copy()
        self.admitted = first.admitted

    def accept(self, token: int, logprobs: dict[int, float] | None) -> None:
        """Appends a generated token that the host has read, and sets `reason` if it is the last.

        Raises:
            Exception: whatever the tokenizer raises.
        """
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.tokens.append(token)
        self.reason = self.stop_reason()
        if self.stream is None and self.pieces is None:
            return
        text = self._push(token)
        self.text += text
        if self.pieces is not None:
            self.pieces.append(
                Piece(text=text, token_id=token, finish_reason=self.reason, logprobs=logprobs)
            )

    def stop_reason(self) -> str | None:
        """Returns why the last token ends the request; `None` if it does not."""
        if self.tokens[-1] in self.request.stop_ids and self.generated:
            return "stop"
        return "length" if len(self.tokens) == self.longest else None

    def end(self, reason: str) -> None:
        """Ends after the last token that was accepted, or before any was, with the text that is left."""
        self.reason = reason
        text = ""
        if self.stream is not None:
            text, _ = self.stream.finish(may_stop=False)
            self.text += text
        if self.pieces is not None:
            self.pieces.append(Piece(text=text, token_id=None, finish_reason=reason))

    def restart(self) -> None:
        """Forgets everything but its tokens: its pages are gone, and steps in flight no longer count."""
        self.pages = None
        self.collected = self.pending = self.publishes_at = 0
        self.tainted = self.fetched = False
        self.epoch += 1

    def forget_admission(self) -> None:
        """Forgets what `begin_from` recorded of the first admission, which did not take place."""
        self.cached, self.shared, self.keys, self.admitted = None, 0, None, None

    def _push(self, token: int) -> str:
        """Returns the text that a token adds, which may end the request too."""
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
    """Returns a sequence that waits, with text if somebody takes its pieces or a string may end it."""
    made = RequestState(request=request, number=number, tokens=list(request.prompt), arrived=now)
    if streamed:
        made.pieces = deque()
    if tokenizer is not None and (streamed or request.params.stop):
        made.stream = TextStream(tokenizer, request.prompt, request.params)
    return made

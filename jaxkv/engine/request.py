"""A request as the user made it, and what comes back. Knows no arrays and no cache."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from jaxkv.config.checks import as_int
from jaxkv.config.sampling import SamplingParams
from jaxkv.runner.rows import Row


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample of one prompt; `n` samples of a prompt are `n` requests.

    Attributes:
        prompt: token ids.
        text: the text that the prompt was given as; `None` if it was given as ids.
        params: how its tokens are chosen; `max_tokens` already fits the context.
        seed: the 64-bit seed of this sample.
        stop_ids: ids that end it, the model's own included unless it ignores them.
        priority: requests of a lower number are served first; among equals the earlier one.
        salt: only requests of the same salt share pages.

    Raises:
        ValueError: the priority is no int of 64 bits, or the salt cannot be hashed.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    priority: int = 0
    salt: str | bytes | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        """Refuses what the scheduler could not order, or the prefix index not hash."""
        object.__setattr__(self, "priority", as_int("priority", self.priority, -(2**63), 2**63 - 1))
        check_salt(self.salt)

    @property
    def max_tokens(self) -> int:
        """Most tokens to generate."""
        assert self.params.max_tokens is not None, "a request's max_tokens fits the context"
        return self.params.max_tokens

    @property
    def tokens_held(self) -> int:
        """Most tokens whose keys and values it needs pages for: those of the last generated one are never written."""
        return len(self.prompt) + self.max_tokens - 1

    def row(self, sequence: int) -> Row:
        """Returns the whole prompt as one row of a step, for a sequence of this number in the page allocator."""
        return Row(
            sequence=sequence,
            tokens=self.prompt,
            start=0,
            params=self.params,
            seed=self.seed,
            stop_ids=self.stop_ids,
        )


def check_salt(salt: object) -> None:
    """Raises `ValueError` for what the prefix index cannot hash."""
    if not isinstance(salt, str | bytes | None):
        raise ValueError(f"salt must be a str, bytes or None, got {salt!r}")
    if isinstance(salt, str):
        try:
            salt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"salt must be a str that UTF-8 can encode, got {salt!r}; give bytes instead"
            ) from error


def sample_seed(
    params: SamplingParams, sample: int, draw: Callable[[int], int] = secrets.randbits
) -> int:
    """Returns the seed of the `sample`-th sample: the request's own for the first, then its successors.

    A sample of a request without a seed gets `draw(64)`, a number of so many bits.
    """
    return draw(64) if params.seed is None else (params.seed + sample) % 2**64


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one prompt and its samples took, in tokens.

    Attributes:
        prompt_tokens: of the prompt, however many samples it has.
        cached_tokens: of these, those that the prefix cache had when the first sample began.
        output_tokens: generated, over all samples.
        preemptions: how often a sample lost its pages and was computed again.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were not cached."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, kw_only=True, repr=False)
class Timing:
    """When things happened to one sample, in seconds of `time.monotonic`. What never happened is `None`.

    It is shown as durations, since the origin of that clock means nothing.

    Attributes:
        arrived: the request was queued.
        admitted: it was given pages and a place in a step.
        first_token: the host read its first token.
        finished: it ended, in whatever way.
        output_tokens: tokens between the two.
    """

    arrived: float
    admitted: float | None
    first_token: float | None
    finished: float
    output_tokens: int

    @property
    def queue_seconds(self) -> float:
        """How long it waited to be admitted, or to be given up."""
        return (self.finished if self.admitted is None else self.admitted) - self.arrived

    @property
    def ttft(self) -> float | None:
        """Time to the first token: seconds from its arrival."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Time per output token: mean seconds from one token to the next; `None` for fewer than two."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)

    @property
    def total_seconds(self) -> float:
        """Seconds from its arrival to its end."""
        return self.finished - self.arrived

    def __repr__(self) -> str:
        """Returns the durations in seconds, to three digits."""
        names = ("queue_seconds", "ttft", "tpot", "total_seconds")
        spans = {name: getattr(self, name) for name in names}
        told = [
            f"{name}={span if span is None else format(span, '.3g')}"
            for name, span in spans.items()
        ]
        return f"Timing({', '.join(told)}, output_tokens={self.output_tokens})"


@dataclass(frozen=True, kw_only=True)
class SampleOutput:
    """One generated text.

    Attributes:
        text: the text of the generated tokens behind that of the prompt; empty if the model has no tokenizer.
        token_ids: the generated ids, the stop id included.
        finish_reason: "stop" (a stop id or a stop string), "length" (a limit or the context's end), "abort", or
            "error".
        stop_reason: the stop string, or the id among the request's `stop_token_ids`, that ended it; `None` for the
            model's own end ids and for every other `finish_reason`.
        error: what failed, if `finish_reason` is "error"; `None` otherwise.
        cumulative_logprob: sum of the chosen tokens' log-probabilities; `None` unless `logprobs` was asked for.
        logprobs: per token, token id -> natural log-probability of the raw logits for the chosen token and the
            top n; `None` unless asked for.
        timing: when it was queued, admitted, begun and done.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    error: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None
    timing: Timing


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt. The names of the first sample are repeated on top.

    Attributes:
        request_id: a number, as text, that no other request to the same `LLM` has.
        outputs: `n` samples.
        finished: always true; every sample has ended.
        usage: tokens of the prompt and of all samples.
        prompt: the text of the prompt; `None` if it was given as ids or as a conversation.
        prompt_token_ids: the prompt as the model saw it.
    """

    request_id: str
    outputs: list[SampleOutput]
    finished: bool = True
    usage: Usage
    prompt: str | None = None
    prompt_token_ids: list[int]

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first sample."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first sample ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop id that ended the first sample."""
        return self.outputs[0].stop_reason

    @property
    def error(self) -> str | None:
        """What failed in the first sample."""
        return self.outputs[0].error

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the first sample's tokens."""
        return self.outputs[0].cumulative_logprob

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """Log-probabilities of the first sample."""
        return self.outputs[0].logprobs

    @property
    def timing(self) -> Timing:
        """Timing of the first sample."""
        return self.outputs[0].timing


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One step of a stream.

    Attributes:
        text: new text; may be empty while a character is incomplete.
        token_id: the new token; `None` on a last piece that no token came with: an abort or an error.
        finish_reason: set on the last piece.
        error: what failed, if `finish_reason` is "error".
        logprobs: token id -> log-probability, if asked for.
        usage, timing: of the whole stream; set on the last piece.
    """

    text: str
    token_id: int | None
    finish_reason: str | None = None
    error: str | None = None
    logprobs: dict[int, float] | None = None
    usage: Usage | None = None
    timing: Timing | None = None

"""A request, and its results: outputs, stream pieces, usage and timing. Pure data: no arrays, no cache."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxkv.config.checks import as_int
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.lora.loaded_adapter import AdapterVersion, LoadedAdapter
from jaxkv.runner.rows import Row
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.structured.grammar import Grammar


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample of one prompt; `n` samples of a prompt are `n` requests.

    Attributes:
        prompt: token ids.
        text: the prompt as text; `None` if the user gave ids.
        params: sampling parameters; `max_tokens` already fits the context.
        seed: the 64-bit seed of this sample.
        stop_ids: ids that end it; they include the model's end ids unless `ignore_eos` is set.
        priority: a lower number is served first; among equals, the earlier request.
        salt: only requests of the same salt share pages.
        grammar: compiled `params.structured_outputs`; `None` if these are.
        given: token ids that it takes in place of sampled ones, for their log-probabilities, which `params` must ask
            for; it ends with the last of them. Empty for a request that samples.
        adapter: the adapter that `params.lora` names; the salt is then `LoadedAdapter.salted`.

    Raises:
        ValueError: the priority is not a 64-bit int, the salt cannot be hashed, or more tokens are given than fit.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    priority: int = 0
    salt: str | bytes | None = None
    text: str | None = None
    grammar: Grammar | None = None
    given: tuple[int, ...] = ()
    adapter: LoadedAdapter | None = None

    def __post_init__(self) -> None:
        """Checks the priority, which the scheduler sorts by, the salt, which the prefix index hashes, and `given`."""
        object.__setattr__(self, "priority", as_int("priority", self.priority, -(2**63), 2**63 - 1))
        check_salt(self.salt)
        if self.given and len(self.given) > self.max_tokens:
            raise ValueError(
                f"a sample of {len(self.given)} tokens does not fit behind a prompt of {len(self.prompt)}, which has "
                f"room for {self.max_tokens}; shorten it or raise max_model_len"
            )

    @property
    def max_tokens(self) -> int:
        """Most tokens to generate."""
        assert self.params.max_tokens is not None, "a request's max_tokens fits the context"
        return self.params.max_tokens

    @property
    def adapter_slot(self) -> int:
        """1 + the index of its adapter in the stack of adapters; 0 for none."""
        return 0 if self.adapter is None else self.adapter.slot

    @property
    def tokens_held(self) -> int:
        """Most tokens that it needs pages for: the last generated token's keys and values are never written."""
        return len(self.prompt) + self.max_tokens - 1

    def row(self, sequence: int) -> Row:
        """Returns the whole prompt as one row of a step.

        Args:
            sequence: its number in the page allocator.
        """
        return Row(
            sequence=sequence,
            tokens=self.prompt,
            start=0,
            params=self.params,
            seed=self.seed,
            stop_ids=self.stop_ids,
            adapter_slot=self.adapter_slot,
        )


def check_salt(salt: object) -> None:
    """Raises `ValueError` if the prefix index cannot hash the salt."""
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
    """Returns the 64-bit seed of one sample: `params.seed + sample`, or a random one if `params.seed` is `None`.

    Args:
        params: sampling parameters.
        sample: index of the sample.
        draw: returns a random number, given its bits.
    """
    return draw(64) if params.seed is None else (params.seed + sample) % 2**64


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of one prompt and its samples.

    Attributes:
        prompt_tokens: length of the prompt, counted once for all samples.
        cached_tokens: prompt tokens that the prefix cache held when the first sample was admitted.
        output_tokens: generated tokens of all samples.
        preemptions: how often a sample lost its pages and was computed again.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not cached."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, kw_only=True, repr=False)
class Timing:
    """Times of one sample, in seconds of `time.monotonic`; `None` for an event that did not occur.

    It is shown as durations, since the origin of that clock means nothing.

    Attributes:
        arrived: the request was queued.
        admitted: the request first got pages and took part in a step.
        first_token: the host read its first token.
        finished: it ended, for any reason.
        output_tokens: number of generated tokens.
    """

    arrived: float
    admitted: float | None
    first_token: float | None
    finished: float
    output_tokens: int

    @property
    def queue_seconds(self) -> float:
        """Seconds in the queue: until it was admitted, or until it ended without admission."""
        return (self.finished if self.admitted is None else self.admitted) - self.arrived

    @property
    def ttft(self) -> float | None:
        """Time to the first token: seconds from its arrival."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Time per output token: mean seconds between two tokens; `None` for fewer than two tokens."""
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
        times = [
            f"{name}={span if span is None else format(span, '.3g')}"
            for name, span in spans.items()
        ]
        return f"Timing({', '.join(times)}, output_tokens={self.output_tokens})"


@dataclass(frozen=True, kw_only=True)
class SampleOutput:
    """One generated text.

    Attributes:
        text: the generated text, without the prompt; empty if the model has no tokenizer.
        token_ids: the generated ids, the stop id included.
        finish_reason: "stop" (a stop id or a stop string), "length" (a limit or the context's end), "abort", or
            "error".
        stop_reason: the stop string or the id of `stop_token_ids` that ended it; `None` for the model's end ids and for
            every other `finish_reason`.
        error: the error message if `finish_reason` is "error"; `None` otherwise.
        cumulative_logprob: sum of the sampled tokens' log-probabilities; `None` unless `logprobs` was requested.
        logprobs: per token, token id -> natural log-probability under the distribution that `logprobs_mode` names, for
            the sampled token and the top n; `None` unless requested.
        weight_versions: per token, the version of the parameters that sampled it (`LLM.update_weights`).
        adapter: the adapter of `SamplingParams.lora` and its version (`LLM.add_lora`); `None` for the model alone.
        routed_experts: int16 `[tokens, layers, top_k]`, best first: the experts that the routers chose for each token
            of the prompt and of the output but the last, which no step has computed, in the layers that have experts.
            After a preemption they are those of the second computation. `None` without
            `CacheConfig(routed_experts=True)`, and for an output that no sampled token ended: after an abort or an
            error, or if a grammar forced the last token, which happens in requests without `logprobs` alone.
        timing: when it was queued, was admitted, gave its first token and ended.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    error: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None
    weight_versions: list[WeightVersion]
    adapter: AdapterVersion | None = None
    routed_experts: np.ndarray | None = None
    timing: Timing


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The result of `LLM.generate` for one prompt. `text`, `token_ids` and so on are those of the first sample.

    Attributes:
        request_id: a number, as text, unique within one `LLM`.
        outputs: the `n` samples.
        finished: always True: every sample has ended.
        usage: token counts of the prompt and of all samples.
        prompt: the prompt as text; `None` if it was given as ids or as a conversation.
        prompt_token_ids: token ids of the prompt, as the model reads them.
        prompt_logprobs: per token of the prompt, token id -> natural log-probability of the raw logits, for the token
            itself and the top n; `None` for the first token. `None` unless requested.
    """

    request_id: str
    outputs: list[SampleOutput]
    finished: bool = True
    usage: Usage
    prompt: str | None = None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, float] | None] | None = None

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
        """Stop string or stop id that ended the first sample."""
        return self.outputs[0].stop_reason

    @property
    def error(self) -> str | None:
        """Error message of the first sample."""
        return self.outputs[0].error

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the first sample."""
        return self.outputs[0].cumulative_logprob

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """Log-probabilities of the first sample."""
        return self.outputs[0].logprobs

    @property
    def weight_versions(self) -> list[WeightVersion]:
        """Versions of the parameters that sampled the tokens of the first sample."""
        return self.outputs[0].weight_versions

    @property
    def adapter(self) -> AdapterVersion | None:
        """The adapter of all samples and its version; `None` for the model alone."""
        return self.outputs[0].adapter

    @property
    def timing(self) -> Timing:
        """Timing of the first sample."""
        return self.outputs[0].timing


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One item of a stream: a new token and its text.

    Attributes:
        text: new text; empty while a character is incomplete.
        token_id: the new token; `None` on the last piece of an aborted or failed request.
        finish_reason: see `SampleOutput`; set on the last piece.
        error: the error message if `finish_reason` is "error".
        logprobs: token id -> log-probability, if requested.
        weight_version: version of the parameters that sampled the token; `None` without a token.
        usage, timing: of the whole request; set on the last piece.
    """

    text: str
    token_id: int | None
    finish_reason: str | None = None
    error: str | None = None
    logprobs: dict[int, float] | None = None
    weight_version: WeightVersion | None = None
    usage: Usage | None = None
    timing: Timing | None = None

"""`SamplingParams`: how the tokens of one request are sampled, and when it ends."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

from jaxkv.config.checks import INT32_MAX, as_float, as_int, check_fields
from jaxkv.config.lora import check_adapter_name
from jaxkv.config.processor_calls import ProcessorCalls
from jaxkv.config.structured_outputs import StructuredOutputs
from jaxkv.config.vllm_names import accepts_vllm_names
from jaxkv.wording import shown

MAX_LOGPROBS = 20
MAX_STOP_IDS = 64
MAX_EOS_IDS = 64
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 256
MAX_STRING_CHARACTERS = 256
MAX_BIAS_ENTRIES = 1024

SMALLEST_TEMPERATURE = 2.0**-126
"""The smallest normal float32. The device may flush smaller temperatures to zero, so they count as zero."""

LOGPROBS_MODES = ("raw", "temperature", "truncated")
"""The distributions whose log-probabilities can be reported; the device reads the index."""


def _as_strings(name: str, given: str | Iterable[str] | None, most: int) -> tuple[str, ...]:
    """Returns the strings as a tuple; a single string counts as a list of one, and `None` as an empty list."""
    if not isinstance(given, str | Iterable | None):
        raise ValueError(f"{name} must be a string or a sequence of strings, got {shown(given)}")
    strings = (given,) if isinstance(given, str) else tuple(given or ())
    as_int(f"the number of {name} strings", len(strings), 0, most)
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STRING_CHARACTERS:
            raise ValueError(
                f"{name} must hold strings of 1 to {MAX_STRING_CHARACTERS} characters, got {shown(string)}"
            )
    return strings


class TokenBias(Mapping[int, float]):
    """A checked and immutable `logit_bias`: token id -> bias. It can be hashed, copied and pickled."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        if not isinstance(biases, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {shown(biases)}")
        as_int("the number of logit_bias entries", len(biases), 0, MAX_BIAS_ENTRIES)
        ids = (as_int("logit_bias token ids", token, 0, INT32_MAX) for token in biases)
        values = (
            -math.inf if bias == -math.inf else as_float("logit_bias values", bias, -100.0, 100.0)
            for bias in biases.values()
        )
        self._values = dict(zip(ids, values, strict=True))

    def __getitem__(self, token: int) -> float:
        return self._values[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@accepts_vllm_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are sampled, and when it ends. Checked on construction.

    Operations on a row's logits, in this order: penalties, `logit_bias`, `logits_processors` in the order in which they
    are registered, the mask of `structured_outputs`, masking of stop ids before `min_tokens`, temperature, `top_k`,
    `top_p` (over the tokens that `top_k` keeps), `min_p`. Log-probabilities are those of the logits before all of them,
    unless `logprobs_mode` names another distribution.

    Attributes:
        temperature: divides the logits; 0, like all below 2**-126, takes the most likely token (greedy, ties to the
            lowest id).
        top_k: keep the k most likely tokens; 0 and -1 keep all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1.0 keeps all.
        min_p: keep tokens with at least this fraction of the most likely token's probability; 0.0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1.0 is off.
        presence_penalty: subtracted from the logits of tokens in the output; 0.0 is off.
        frequency_penalty: subtracted once per occurrence in the output; 0.0 is off.
        logit_bias: token id -> number added to its logit, in [-100, 100], or -inf to forbid the token. The mapping is
            copied.
        logits_processors: name of a registered processor -> its arguments; `LLM(logits_processors=...)` registers them.
            An argument that is not given has its default. The mapping is copied.
        bad_words: up to 256 words of one token each. The token of the word, at the start of a text and after a space,
            gets a bias of -inf. The same letters may still be generated as several other tokens.
        seed: 64-bit seed of this request's random numbers, which depend only on the seed and the position; `None` draws
            a random seed.
        n: number of samples of the same prompt.
        max_tokens: most tokens to generate; `None` for as many as the context has room for.
        min_tokens: stop ids cannot be sampled before this many tokens, for which the context must have room.
        stop_token_ids: up to 64 ids that end the request, besides the model's own end ids.
        stop: up to 64 strings that end the request; the text ends before the string. Checked from `min_tokens` tokens
            on.
        include_stop_str_in_output: the text ends after the stop string instead of before it.
        skip_special_tokens: special tokens add no text; otherwise they add their names, the end id included.
        ignore_eos: the model's own end ids do not end the request.
        logprobs: number of most likely tokens, up to 20, whose log-probabilities are reported beside the sampled
            token's; `None` for no log-probabilities.
        logprobs_mode: the distribution of `logprobs`, one of `LOGPROBS_MODES`. "raw": the model's. "temperature": the
            model's logits divided by `temperature`. "truncated": the one that the token is drawn from, after all
            operations above, so tokens that `top_k`, `top_p` or `min_p` drop have -inf.
        prompt_logprobs: likewise for the tokens of the prompt, which are then scored in a step of their own, always
            under the model's distribution. Outputs have them, streams do not.
        structured_outputs: the grammar that the text must follow; `None` for free text.
        lora: name of the low-rank adapter that computes the prompt and the tokens, see `LLM.add_lora`; `None` for the
            model alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = TokenBias({})
    logits_processors: Mapping[str, Mapping[str, Any]] = ProcessorCalls({})
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_mode: str = "raw"
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for values out of range or of the wrong type."""
        check_fields(self, as_float, 0.0, 100.0, "temperature")
        check_fields(self, as_int, -1, INT32_MAX, "top_k")
        object.__setattr__(self, "top_k", max(0, self.top_k))
        check_fields(self, as_float, 0.0, 1.0, "top_p", "min_p")
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0 (it would keep no token), use temperature=0")
        check_fields(self, as_float, 0.01, 100.0, "repetition_penalty")
        check_fields(self, as_float, -100.0, 100.0, "presence_penalty", "frequency_penalty")
        if self.seed is not None:
            if not isinstance(self.seed, Integral):
                raise ValueError(
                    f"seed must be an int, got {self.seed!r}; jaxkv.generate takes arrays and tracers as seeds="
                )
            check_fields(self, as_int, -(2**63), 2**64 - 1, "seed")
        check_fields(self, as_int, 1, 1024, "n")
        if self.max_tokens is not None:
            check_fields(self, as_int, 1, INT32_MAX, "max_tokens")
        most, why = INT32_MAX, ""
        if self.max_tokens is not None:
            most, why = self.max_tokens, f"max_tokens is {self.max_tokens}"
        object.__setattr__(self, "min_tokens", as_int("min_tokens", self.min_tokens, 0, most, why))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_fields(self, as_int, 0, MAX_LOGPROBS, name)
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(
                f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {shown(self.logprobs_mode)}"
            )
        if self.logprobs_mode != "raw" and self.temperature < SMALLEST_TEMPERATURE:
            raise ValueError(
                f"logprobs_mode is {self.logprobs_mode!r}, but a greedy request draws from no distribution, and "
                f"temperature {self.temperature} is greedy; give one of at least 2**-126, or logprobs_mode='raw'"
            )
        if self.temperature < SMALLEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise ValueError(
                f"structured_outputs must be StructuredOutputs(json=...), (regex=...) or the like, got "
                f"{shown(self.structured_outputs)}"
            )
        if self.lora is not None:
            check_adapter_name(self.lora)
        self._check_ids()

    def _check_ids(self) -> None:
        try:
            ids = tuple(self.stop_token_ids)
        except TypeError:
            got = shown(self.stop_token_ids)
            raise ValueError(f"stop_token_ids must be a sequence of ids, got {got}") from None
        as_int("the number of stop_token_ids", len(ids), 0, MAX_STOP_IDS)
        ids = tuple(as_int("stop_token_ids", token, 0, INT32_MAX) for token in ids)
        object.__setattr__(self, "stop_token_ids", ids)
        if type(self.logit_bias) is not TokenBias:
            object.__setattr__(self, "logit_bias", TokenBias(self.logit_bias))
        if type(self.logits_processors) is not ProcessorCalls:
            object.__setattr__(self, "logits_processors", ProcessorCalls(self.logits_processors))
        for name, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            object.__setattr__(self, name, _as_strings(name, getattr(self, name), most))

    def check_vocab(self, vocab_size: int) -> None:
        """Raises `ValueError` if a stop id or biased id of this request is not below `vocab_size`."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise ValueError(
                    f"{name} must be below {vocab_size}, the model's number of token ids, got {outside[0]}"
                )


def kept_sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Returns `SamplingParams(**given)`: the same object for what was given lately, since most requests are alike."""
    key = tuple([(name, type(value), value) for name, value in given.items()])
    try:
        return _made(key)
    except TypeError:  # A value, such as a list, has no hash.
        return SamplingParams(**given)


@lru_cache(maxsize=256)
def _made(key: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    return SamplingParams(**{name: value for name, _, value in key})

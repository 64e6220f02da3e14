"""The table of the fields with which a request chooses its sampling.

Types, ranges and descriptions are written here once. `SamplingParams`, the messages about wrong values and the OpenAPI
document are derived from them.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxkv.config.checks import INT32_MAX
from jaxkv.config.processor_calls import MAX_PROCESSORS
from jaxkv.config.sampling import (
    MAX_BAD_WORDS,
    MAX_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_STRING_CHARACTERS,
    SamplingParams,
    kept_sampling,
)
from jaxkv.serve.api.structured_fields import StructuredFields
from jaxkv.serve.http.errors import ApiError, bad_request
from jaxkv.wording import clip

MAX_SAMPLES = 128
_Text = Annotated[str, Meta(min_length=1, max_length=MAX_STRING_CHARACTERS)]
_TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Label = Annotated[str, Meta(max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Options of a stream.

    Attributes:
        include_usage: the last chunk has the token counts and no choices.
        include_obfuscation: accepted; no padding is ever sent.
        continuous_usage_stats: every chunk has the token counts so far.
    """

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(StructuredFields, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The fields that completions and chat completions share. `null` means that a field is not given."""

    model: Annotated[str, Meta(description="the served model's name; /v1/models lists it")]
    temperature: (
        Annotated[float, Meta(ge=0, le=2, description="divides the logits; 0 is greedy")] | None
    ) = None
    top_p: (
        Annotated[
            float,
            Meta(gt=0, le=1, description="keeps the fewest tokens whose probability reaches this"),
        ]
        | None
    ) = None
    top_k: (
        Annotated[
            int, Meta(ge=-1, le=INT32_MAX, description="keeps the k likeliest tokens; 0, -1: all")
        ]
        | None
    ) = None
    min_p: (
        Annotated[
            float, Meta(ge=0, le=1, description="least share of the likeliest token's probability")
        ]
        | None
    ) = None
    presence_penalty: (
        Annotated[
            float, Meta(ge=-2, le=2, description="subtracted from logits of tokens in the output")
        ]
        | None
    ) = None
    frequency_penalty: (
        Annotated[
            float,
            Meta(ge=-2, le=2, description="subtracted once for each occurrence in the output"),
        ]
        | None
    ) = None
    repetition_penalty: (
        Annotated[
            float,
            Meta(ge=0.01, le=100, description="divides positive logits of tokens in the text"),
        ]
        | None
    ) = None
    logit_bias: (
        Annotated[
            dict[_TokenId, Annotated[float, Meta(ge=-100, le=100)]],
            Meta(max_length=MAX_BIAS_ENTRIES, description="token id -> number added to its logit"),
        ]
        | None
    ) = None
    logits_processors: (
        Annotated[
            dict[Name, dict[Name, Any]],
            Meta(
                max_length=MAX_PROCESSORS,
                description="name of a logits processor of this server -> its arguments",
            ),
        ]
        | None
    ) = None
    seed: (
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="seed of the random numbers")]
        | None
    ) = None
    n: (
        Annotated[int, Meta(ge=1, le=MAX_SAMPLES, description="number of samples of the prompt")]
        | None
    ) = None
    max_tokens: (
        Annotated[int, Meta(ge=1, le=INT32_MAX, description="most tokens to generate")] | None
    ) = None
    min_tokens: (
        Annotated[int, Meta(ge=0, le=INT32_MAX, description="tokens before the text may end")]
        | None
    ) = None
    stop: (
        _Text
        | Annotated[
            list[_Text],
            Meta(max_length=MAX_STOP_STRINGS, description="texts that end the generation"),
        ]
        | None
    ) = None
    stop_token_ids: (
        Annotated[
            list[_TokenId], Meta(max_length=MAX_STOP_IDS, description="ids that end the generation")
        ]
        | None
    ) = None
    bad_words: (
        Annotated[
            list[_Text],
            Meta(max_length=MAX_BAD_WORDS, description="words of one token that are forbidden"),
        ]
        | None
    ) = None
    include_stop_str_in_output: (
        Annotated[bool, Meta(description="the text ends behind the stop text")] | None
    ) = None
    skip_special_tokens: Annotated[bool, Meta(description="special tokens add no text")] | None = (
        None
    )
    ignore_eos: (
        Annotated[bool, Meta(description="the model's own end does not end the text")] | None
    ) = None
    prompt_logprobs: (
        Annotated[
            int,
            Meta(ge=0, le=MAX_LOGPROBS, description="likeliest tokens at each place of the prompt"),
        ]
        | None
    ) = None
    priority: (
        Annotated[
            int,
            Meta(ge=-INT32_MAX, le=INT32_MAX, description="lower numbers are served first"),
        ]
        | None
    ) = None
    cache_salt: (
        Annotated[
            Label, Meta(description="only requests of the same salt and key share cached pages")
        ]
        | None
    ) = None
    stream: Annotated[bool, Meta(description="answer with server-sent events")] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: (
        Annotated[bool, Meta(description="choices have the token ids of prompt and text")] | None
    ) = None
    user: Annotated[Label, Meta(description="accepted; has no effect")] | None = None
    metadata: (
        Annotated[dict[Label, Label], Meta(max_length=16, description="accepted; has no effect")]
        | None
    ) = None

    def sampling(
        self,
        defaults: Mapping[str, float],
        **changes: Any,  # noqa: ANN401 - as the fields
    ) -> SamplingParams:
        """Returns the sampling parameters.

        Args:
            defaults: attributes of `SamplingParams` for those that the request does not give.
            changes: attributes of `SamplingParams` that the request has under other names.

        Raises:
            ApiError: 400 for values that contradict each other.
        """
        if (demanded := self.demanded()) is not None:
            changes.setdefault("structured_outputs", demanded)
        given: dict[str, Any] = dict(defaults)
        given |= {name: value for name in _SHARED if (value := getattr(self, name)) is not None}
        try:
            return kept_sampling(given | changes)
        except ValueError as error:
            param = next((name for name in _SHARED if clip(error).startswith(name)), None)
            raise bad_request(clip(error, 300), param) from error

    def check_stream_options(self) -> None:
        """Raises `ApiError` for options of a stream without a stream."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options need stream to be true", "stream_options")


_SHARED = frozenset(SamplingFields.__struct_fields__) & {
    field.name for field in fields(SamplingParams)
} - {"structured_outputs"}

REFUSED: Mapping[str, str] = {
    "suffix": "text is generated at the end of the prompt alone",
    "best_of": "all samples are returned; use n",
    "use_beam_search": "beams are not searched",
    "chat_template": "the chat template is the model's own",
    "documents": "documents are not put into prompts; put them into a message",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": "only text is generated",
    "audio": "only text is generated",
    "prediction": "predicted outputs are not used",
    "web_search_options": "the server fetches nothing",
}
"""Fields of OpenAI and vLLM that would change the answer and are not served, and what to do instead."""

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "modalities": (["text"],),
}
"""Values of refused fields that change nothing."""


def without_refused(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a body without fields that are not served but have no effect as given.

    Raises:
        ApiError: 400 for a field that is not served and would change the answer.
    """
    kept = dict(tree)
    for name, why in REFUSED.items():
        if name not in kept:
            continue
        value = kept.pop(name)
        if name == "best_of" and type(value) is int and 1 <= value <= _samples(tree):
            continue
        if value is not None and value not in _HARMLESS.get(name, ()):
            raise ApiError(400, "unsupported_field", f"{name} is not supported: {why}", name)
    return kept


def _samples(tree: Mapping[str, Any]) -> int:
    """Returns the samples that a body asks for; 1 if its `n` is no number, which is refused later."""
    given = tree.get("n")
    return max(1, given) if type(given) is int else 1

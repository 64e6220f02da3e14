"""Normalises and checks the prompts, conversations and sampling parameters that users pass in."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import jax
import numpy as np

from jaxkv.config.sampling import SamplingParams
from jaxkv.config.vllm_names import ALIASES, unknown_option
from jaxkv.text.chat_template import ChatOptions
from jaxkv.text.tokenizer import NO_TOKENIZER
from jaxkv.wording import clip, listed, shown

Ids = Sequence[int | np.integer] | np.ndarray | jax.Array
Prompt = str | Ids | Mapping[str, Any]
"""A text, token ids, or a dict with "prompt" or "prompt_token_ids", and optionally "cache_salt"."""

Messages = str | Sequence[Mapping[str, Any]]
"""One conversation: dicts with "role" and "content", or the text of a single user message."""

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class TextEncoder(Protocol):
    """The tokenizer's method that prompts need."""

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Returns the ids of a text; raises `ValueError` if it certainly has more than `max_tokens`."""
        ...


@dataclass(frozen=True)
class TokenizedPrompt:
    """One tokenized prompt.

    Attributes:
        ids: its token ids.
        text: its text; `None` if it was given as ids.
        salt: prompts share cached pages only if their salts are equal.
    """

    ids: tuple[int, ...]
    text: str | None = None
    salt: str | bytes | None = None


def tokenize(
    prompt: Prompt,
    tokenizer: TextEncoder | None,
    vocab_size: int,
    *,
    max_tokens: int | None = None,
) -> TokenizedPrompt:
    """Returns the tokens of a prompt given in any form.

    Args:
        prompt: a text, ids in [0, `vocab_size`), or a dict with either.
        tokenizer: the tokenizer of texts; `None` if there is none.
        vocab_size: number of the model's token ids.
        max_tokens: reject a text that certainly has more ids, before it is encoded; `None` for no limit.

    Raises:
        ValueError: the prompt has none of these forms, is empty, is certainly too long, or has ids out of range.
    """
    if not isinstance(prompt, Mapping):
        text = prompt if isinstance(prompt, str) else None
        ids = prompt_ids(prompt, tokenizer, vocab_size, max_tokens=max_tokens)
        return TokenizedPrompt(ids, text)
    unknown = [key for key in prompt if key not in _KEYS]
    text = prompt.get("prompt")
    given = text if prompt.get("prompt_token_ids") is None else prompt["prompt_token_ids"]
    if unknown or given is None or not isinstance(text, str | None):
        raise ValueError(
            f'a dict prompt must have "prompt" (a text) or "prompt_token_ids", and may have "cache_salt"; '
            f"got the keys {listed([repr(key) for key in prompt])}"
        )
    ids = prompt_ids(given, tokenizer, vocab_size, max_tokens=max_tokens)
    return TokenizedPrompt(ids, text, prompt.get("cache_salt"))


def prompt_ids(
    prompt: str | Ids,
    tokenizer: TextEncoder | None,
    vocab_size: int,
    *,
    max_tokens: int | None = None,
) -> tuple[int, ...]:
    """Returns the token ids of a text, or of a list or array of ids; the arguments are those of `tokenize`.

    Raises:
        ValueError: the prompt is empty, is neither text nor ids, is certainly too long, or has ids out of range.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{NO_TOKENIZER}; or give token ids")
        prompt = tokenizer.encode(prompt, max_tokens=max_tokens)
    listed = _listed(prompt)
    if listed is None:
        raise ValueError(
            f"a prompt must be a text or a list of token ids, got {type(prompt).__name__}"
        )
    ids = tuple(listed)
    if not ids:
        raise ValueError("a prompt needs at least one token, got none")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    for token in ids:
        if not _is_id(token):
            raise ValueError(
                f"token ids must be ints, got {shown(token)}; give several prompts to LLM.generate, and messages to "
                f"LLM.chat"
            )
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the model's [0, {vocab_size})")
    return tuple(int(token) for token in ids)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns a list of prompts; a single text, dict, list or array of ids becomes a list of one.

    Raises:
        ValueError: `prompts` has another type, or mixes ids with other prompts.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = _listed(prompts)
    if listed is None:
        raise ValueError(
            f"prompts must be a text, a list of token ids, or a list of these, got {type(prompts).__name__}"
        )
    ids = [item for item in listed if isinstance(item, int | np.integer)]
    others = [item for item in listed if not isinstance(item, int | np.integer)]
    if ids and others:
        raise ValueError(
            "a list of prompts must hold texts or lists of token ids, got token ids beside them"
        )
    return [listed] if ids else others


def as_conversations(
    messages: Messages | Sequence[Messages],
) -> tuple[list[list[Mapping[str, Any]]], bool]:
    """Returns a list of conversations, and whether `messages` was a list of them rather than one.

    Raises:
        ValueError: `messages` is neither a conversation nor a list of conversations.
    """
    one = _messages(messages)
    if one is not None:
        return [one], False
    listed = messages if isinstance(messages, Sequence) else ()
    several = [found for item in listed if (found := _messages(item)) is not None]
    if not several or len(several) < len(listed):
        raise ValueError(
            f'a conversation is a text or a non-empty list of {{"role": ..., "content": ...}}, and several are a '
            f"list of these; got {clip(repr(messages), 60)}"
        )
    return several, True


def as_call(owner: str, options: Mapping[str, Any], **given: Any) -> dict[str, Any]:  # noqa: ANN401
    """Returns the arguments of a call under jaxkv's names; fields of `SamplingParams` are gathered in `sampling`.

    Args:
        owner: name of the called method, for messages.
        options: further keywords of the call: vLLM's names, fields of `SamplingParams`, and those of `ChatOptions` if
            the call has `chat`.
        given: named arguments of the call; `None` for those that were not given.

    Raises:
        ValueError: a keyword is unknown, or the same option is given twice.
    """
    if not options:
        return given
    ours = {a.theirs: a.ours for a in ALIASES if a.owner == "call" and a.ours in given}
    gathered = {
        name: [field.name for field in fields(kind)]
        for name, kind in (("sampling", SamplingParams), ("chat", ChatOptions))
        if name in given
    }
    for name, value in options.items():
        if any(name in names for names in gathered.values()):
            continue
        if name not in ours:
            chosen = [field for names in gathered.values() for field in names]
            raise unknown_option(owner, name, {each: each for each in (*given, *ours, *chosen)})
        if given[ours[name]] is not None:
            raise ValueError(f"{ours[name]} and {name} are one option of {owner}; give one of them")
        given[ours[name]] = value
    sampling = _chosen(options, gathered.get("sampling", ()))
    if sampling:
        if given["sampling"] is not None:
            raise ValueError(
                f"{owner} got SamplingParams and also {', '.join(sampling)}; write "
                f"SamplingParams({next(iter(sampling))}=...) or give no SamplingParams"
            )
        given["sampling"] = SamplingParams(**sampling)
    if "chat" in given:
        given["chat"] = ChatOptions(**_chosen(options, gathered["chat"]))
    return given


def _chosen(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def one_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Returns one `SamplingParams` per prompt.

    Raises:
        ValueError: `sampling` has another type, or is a list of another length than `count`.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    listed = isinstance(sampling, Sequence) and all(isinstance(w, SamplingParams) for w in sampling)
    if not listed:
        raise ValueError(
            f"sampling must be one SamplingParams or a list of them, got {clip(repr(sampling), 60)}"
        )
    if len(sampling) != count:
        raise ValueError(
            f"got {len(sampling)} SamplingParams for {count} prompts; give one, or one per prompt"
        )
    return list(sampling)


def one_sample(sampling: SamplingParams | None) -> SamplingParams:
    """Returns the sampling parameters of a stream.

    Raises:
        ValueError: they have another type, or ask for several samples or for what streams do not report.
    """
    [params] = one_each(sampling, 1)
    if params.prompt_logprobs is not None:
        raise ValueError("a stream reports no prompt_logprobs; use generate")
    if params.n != 1:
        raise ValueError(f"a stream has one sample, got n={params.n}; use generate")
    return params


@contextmanager
def named(kind: str, index: int, count: int) -> Iterator[None]:
    """Prefixes the `ValueError`s of one item of a list with its kind and index, unless it is the only item."""
    try:
        yield
    except ValueError as error:
        if count == 1:
            raise
        raise ValueError(f"{kind} {index}: {error}") from error


def _listed(prompt: object) -> Sequence[Any] | np.ndarray | None:
    """Returns a sequence, or an array of at least one dimension as NumPy array; `None` for any other value."""
    if isinstance(prompt, jax.Array):
        prompt = np.asarray(prompt)
    if isinstance(prompt, np.ndarray):
        return prompt if prompt.ndim else None
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray):
        return prompt
    return None


def _is_id(token: object) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool)


def _messages(messages: object) -> list[Mapping[str, Any]] | None:
    """Returns the messages of one conversation; `None` if `messages` is no conversation."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not messages:
        return None
    return list(messages) if all(isinstance(each, Mapping) for each in messages) else None

"""What a user may give as prompts and parameters, made uniform and checked. Knows no model."""

from collections.abc import Sequence

import numpy as np

from jaxkv.config import SamplingParams
from jaxkv.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Returns the token ids of a prompt.

    Raises:
        ValueError: it is empty, is neither text nor ids, or has ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("this model directory has no tokenizer.json; give token ids")
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
        raise ValueError(f"a prompt is a text or a list of token ids, got {type(prompt).__name__}")
    ids = tuple(prompt)
    if not ids:
        raise ValueError("a prompt needs at least one token, got none")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise ValueError(
                f"token ids must be ints, got {token!r}; several prompts are for LLM.generate, messages for LLM.chat"
            )
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the model's [0, {vocab_size})")
    return tuple(int(token) for token in ids)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Makes a list of one of a single text or a single list of ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, bytes | bytearray):
        raise ValueError(
            f"prompts are a text, a list of token ids, or a list of these, got {type(prompts).__name__}"
        )
    ids = [item for item in prompts if isinstance(item, int | np.integer)]
    texts = [item for item in prompts if not isinstance(item, int | np.integer)]
    if ids and texts:
        raise ValueError(
            "a list of prompts holds texts or lists of token ids, not bare token ids too"
        )
    return [ids] if ids else texts


def one_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Returns one `SamplingParams` per prompt."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    listed = isinstance(sampling, Sequence) and all(isinstance(w, SamplingParams) for w in sampling)
    if not listed:
        raise ValueError(f"sampling is one SamplingParams or a list of them, got {sampling!r}")
    if len(sampling) != count:
        raise ValueError(
            f"got {len(sampling)} SamplingParams for {count} prompts; give one, or one each"
        )
    return list(sampling)

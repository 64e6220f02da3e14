"""Makes the request of one sample of a tokenized prompt."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.lora.loaded_adapter import LoadedAdapter
from jaxkv.engine.request import Request, check_salt, sample_seed
from jaxkv.structured.grammar import Grammar
from jaxkv.text.prompts import TokenizedPrompt


def new_request(
    prompt: TokenizedPrompt,
    params: SamplingParams,
    sample: int,
    *,
    max_model_len: int,
    eos_ids: Sequence[int],
    draw_seed: Callable[[int], int] = secrets.randbits,
    priority: int = 0,
    grammar: Grammar | None = None,
    adapter: LoadedAdapter | None = None,
) -> Request:
    """Returns the request of one sample; its `max_tokens` fit the context, and `min_tokens` these.

    Args:
        prompt: the tokens.
        params: sampling parameters.
        sample: index of the sample.
        max_model_len: most tokens of prompt and output.
        eos_ids: the model's end ids.
        draw_seed: as `draw` of `sample_seed`.
        priority: a lower number is served first.
        grammar: compiled `params.structured_outputs`.
        adapter: the adapter that `params.lora` names.

    Raises:
        ValueError: the prompt leaves no room for a token.
    """
    room = max_model_len - len(prompt.ids)
    if room < 1:
        raise ValueError(
            f"a prompt of {len(prompt.ids)} tokens leaves no room for another, since max_model_len is "
            f"{max_model_len}; shorten it or raise max_model_len"
        )
    allowed = room if params.max_tokens is None else min(params.max_tokens, room)
    least = min(params.min_tokens, allowed)
    if (params.max_tokens, params.min_tokens) != (allowed, least):
        params = replace(params, max_tokens=allowed, min_tokens=least)
    check_salt(prompt.salt)
    eos = () if params.ignore_eos else eos_ids
    return Request(
        prompt=prompt.ids,
        text=prompt.text,
        params=params,
        seed=sample_seed(params, sample, draw_seed),
        stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
        priority=priority,
        # The keys and values of another adapter's tokens, or of none, are others.
        salt=prompt.salt if adapter is None else adapter.salted(prompt.salt),
        grammar=grammar,
        adapter=adapter,
    )

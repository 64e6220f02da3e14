"""`bad_words` of a request as logit biases of -inf."""

import math
from dataclasses import replace

from jaxkv.config.sampling import SamplingParams
from jaxkv.text.tokenizer import NO_TOKENIZER, Tokenizer


def forbid_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Returns the parameters with `bad_words` turned into entries of `logit_bias`.

    The token of a word at the start of a text is forbidden, and its token after a space if that is a single one too.

    Raises:
        ValueError: a word has several tokens, there is no tokenizer, or there are too many biases.
    """
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise ValueError(f"bad_words need a tokenizer: {NO_TOKENIZER}; or use logit_bias")
    forbidden: dict[int, float] = {}
    for word in params.bad_words:
        plain, spaced = (tokenizer.encode(text, add_special=False) for text in (word, f" {word}"))
        if len(plain) != 1:
            raise ValueError(
                f"bad_words must be words of one token, but {word!r} has {len(plain)}; forbid one of its tokens "
                f"{plain} with a logit_bias of -inf (-100 over HTTP)"
            )
        forbidden |= dict.fromkeys([*plain, *(spaced if len(spaced) == 1 else ())], -math.inf)
    return replace(params, bad_words=(), logit_bias={**params.logit_bias, **forbidden})

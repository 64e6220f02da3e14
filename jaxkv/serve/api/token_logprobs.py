"""Log-probabilities in the two forms of OpenAI: that of chat completions, and the older one of completions."""

from collections.abc import Mapping, Sequence

from jaxkv.serve.token_texts import TokenTexts

Json = dict[str, object]

LEAST = -9999.0
"""Written instead of minus infinity, which JSON lacks."""


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[Mapping[int, float]], top: int, texts: TokenTexts
) -> Json:
    """Returns the log-probabilities of tokens as chat completions have them.

    Args:
        ids: the tokens.
        logprobs: for each, token id -> natural log-probability; the token itself is among them.
        top: number of most likely tokens to list.
        texts: the texts of the model's tokens.
    """
    return {
        "content": [
            {
                **_entry(token, found[token], texts),
                "top_logprobs": [_entry(other, value, texts) for other, value in _top(found, top)],
            }
            for token, found in zip(ids, logprobs, strict=True)
        ],
        "refusal": None,
    }


def completion_logprobs(
    ids: Sequence[int],
    logprobs: Sequence[Mapping[int, float] | None],
    top: int,
    texts: TokenTexts,
    offsets: Sequence[int],
) -> Json:
    """Returns the log-probabilities of tokens as completions have them.

    Args:
        ids: the tokens.
        logprobs: see `chat_logprobs`; `None` for the first token of a prompt.
        top: number of most likely tokens to list.
        texts: the texts of the model's tokens.
        offsets: for each, where its characters begin in the text.
    """
    return {
        "tokens": [texts.text(token) for token in ids],
        "token_logprobs": [
            None if found is None else _finite(found[token])
            for token, found in zip(ids, logprobs, strict=True)
        ],
        "top_logprobs": [
            None
            if found is None
            else {
                # Tokens of incomplete characters may share a text; the likeliest is kept.
                texts.text(other): _finite(value)
                for other, value in reversed(_with_own(found, token, top))
            }
            for token, found in zip(ids, logprobs, strict=True)
        ],
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    ids: Sequence[int],
    logprobs: Sequence[Mapping[int, float] | None],
    top: int,
    texts: TokenTexts,
) -> list[Json | None]:
    """Returns the log-probabilities of a prompt's tokens as vLLM writes them: token id -> value, rank and text.

    The rank of a token of the prompt is null where it is not among the likeliest, which alone are counted.

    Args:
        ids: the prompt.
        logprobs: see `completion_logprobs`.
        top: number of most likely tokens to list.
        texts: the texts of the model's tokens.
    """
    return [
        None
        if found is None
        else {
            str(other): {
                "logprob": _finite(value),
                "rank": rank if rank <= top else None,
                "decoded_token": texts.text(other),
            }
            for rank, (other, value) in enumerate(_with_own(found, token, top), 1)
        }
        for token, found in zip(ids, logprobs, strict=True)
    ]


def _entry(token: int, value: float, texts: TokenTexts) -> Json:
    text, found = texts.of(token)
    return {"token": text, "logprob": _finite(value), "bytes": found}


def _top(found: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:count]


def _with_own(found: Mapping[int, float], token: int, count: int) -> list[tuple[int, float]]:
    listed = _top(found, count)
    if any(other == token for other, _ in listed):
        return listed
    return [*listed, (token, found[token])]


def _finite(value: float) -> float:
    return max(value, LEAST)

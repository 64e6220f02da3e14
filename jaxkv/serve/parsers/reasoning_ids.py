"""The token ids that mark a model's reasoning, for structured output that begins behind it."""

from collections.abc import Callable

from jaxkv.config.reasoning_tokens import ReasoningTokens
from jaxkv.serve.parsers.choose import ParserChoice
from jaxkv.serve.parsers.formats import REASONING_FORMATS, Harmony
from jaxkv.serve.parsers.harmony import FORM_END, FORM_HEADER, open_header


def reasoning_tokens(
    choice: ParserChoice,
    token_id: Callable[[str], int | None],
    *,
    thinking: bool | None,
    prompt_end: str,
) -> ReasoningTokens | None:
    """Returns what marks the reasoning of one answer; `None` if structured output is to begin with the first token.

    That is so for models without reasoning, requests that ask for none, and markers that are not one token each.

    Args:
        choice: the model's parsers.
        token_id: returns the id of the token with a text.
        thinking: whether the request asks for reasoning; `None` if it says nothing.
        prompt_end: the end of the prompt, which may open the reasoning.
    """
    if choice.reasoning is None:
        return None

    def ids(markers: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the ids of markers; none unless each is a token."""
        found = tuple(token for marker in markers if (token := token_id(marker)) is not None)
        return found if len(found) == len(markers) else ()

    format = REASONING_FORMATS[choice.reasoning].format
    if isinstance(format, Harmony):
        end, header = ids((FORM_END,)), ids(FORM_HEADER)
        is_begun = FORM_END in open_header(prompt_end)
        return ReasoningTokens(ends=end, header=header) if end and header and not is_begun else None
    ends = ids(format.ends)
    if thinking is False or not ends:
        return None
    if format.is_open(prompt_end, choice.special_tokens, thinking):
        return ReasoningTokens(ends=ends)
    begins = ids(format.begins)
    return ReasoningTokens(ends=ends, begins=begins) if begins else None

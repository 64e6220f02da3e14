"""`ReasoningTokens`: the tokens that mark the free text before structured output."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxkv.config.checks import as_int
from jaxkv.wording import shown

_MOST_IDS = 64


@dataclass(frozen=True, kw_only=True)
class ReasoningTokens:
    """Token ids that mark the reasoning before the output that `StructuredOutputs` describes.

    Until it has ended, all tokens may follow but those that end a text.

    Attributes:
        ends: ids that end the reasoning; the structured output begins behind the first of them.
        begins: ids of which one may begin the text; with another token the output begins at once. If there are none,
            the text begins inside the reasoning, because the prompt has opened it.
        header: ids right behind which alone an end counts, such as the header of GPT-OSS's final channel; an end is
            then the only token that may follow them. If there are none, every end counts.

    Raises:
        ValueError: `ends` is empty, or an attribute is no list of token ids.
    """

    ends: tuple[int, ...]
    begins: tuple[int, ...] = ()
    header: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Checks the ids, and makes tuples of them."""
        for name in ("ends", "begins", "header"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if not self.ends:
            raise ValueError(
                "ends is empty, so the structured output would never begin; give the ids that end"
            )


def _ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token ids, got {shown(value)}")
    ids = tuple(as_int(f"a token id of {name}", token, 0, 2**31 - 1) for token in value)
    as_int(f"the number of ids in {name}", len(ids), 0, _MOST_IDS)
    return ids

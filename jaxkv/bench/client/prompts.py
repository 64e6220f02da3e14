"""Prompts for a server whose tokenizer is not known here: texts of about a wanted number of tokens, or token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxkv.bench.client.completion import Prompt
from jaxkv.bench.workload import Workload

_COMMON_WORDS = (
    "about after again air all along also always animal answer another around ask away back because been before "
    "begin below best between both bread bring build busy call came can car carry change children city clear "
    "close cold come could country cut dark day did different does door down draw dry each early earth east eat "
    "end enough even ever every face family far farm fast father feel few field fire first fish five floor follow "
    "food foot form found four friend from full game gave girl give glass gold good great green ground group grow "
    "half hand happy hard has have head hear heart heat help here high hill hold home horse hour house hundred "
    "ice idea inside iron island just keep kind king knew know land large last late learn leave left letter life "
    "light line list little live long look low made main make many map mark may mean men might mile mind moon "
    "more morning most mother mountain move much music must name near need never new next night north note "
    "nothing number off often old once one only open order other our out over own page paper part people picture "
    "piece place plan plant play point put question quick rain ran reach read ready red rest right river road "
    "rock room round rule run said same sand saw say school sea second see seem sentence set seven ship short "
    "should show side simple since six slow small snow some song soon sound south space stand star start state "
    "stay step still stone stop story street strong study such summer sun sure table take talk teach tell ten "
    "than that them then there these thing think this thought three through time today together took town travel "
    "tree true try turn two under until upon use very voice wait walk wall want warm watch water way week well "
    "went west what wheel when where which while white who whole why wind winter wish with wood word work world "
    "would write year yes yet you young your"
)
_WORDS = _COMMON_WORDS.split()

SAMPLE_WORDS = 80
"""Words of the text that a server counts the tokens of, before the run."""


@dataclass(frozen=True)
class TokenCounts:
    """A server's number of tokens for a text: a fixed number for the frame, and the rest in proportion to the length.

    The frame is what the server adds to each prompt, such as a chat template.

    Attributes:
        frame: tokens of an empty prompt.
        per_character: tokens of each character.
    """

    frame: float
    per_character: float

    def characters(self, tokens: int) -> int:
        """Returns the characters of a text that has about `tokens` tokens, frame included; at least 1."""
        return max(1, round((tokens - self.frame) / self.per_character))

    def tokens(self, text: str) -> int:
        """Returns about how many tokens a text has, without the frame; at least 1."""
        return max(1, round(len(text) * self.per_character))


def token_counts(text: str, once: int, twice: int) -> TokenCounts:
    """Returns the counts of a server.

    Args:
        text: a text.
        once: tokens of a prompt of this text.
        twice: tokens of a prompt that has it twice, so that the difference is that of the text without the frame.

    Raises:
        ValueError: the longer prompt has no more tokens.
    """
    if twice <= once:
        raise ValueError(
            f"the server counts {once} prompt tokens for {len(text)} characters and {twice} for twice as many, so no "
            "lengths can be planned; send token ids with --vocab-size"
        )
    # The separator between the two texts is part of a word's token.
    return TokenCounts(
        frame=float(max(0, 2 * once - twice)), per_character=(twice - once) / (len(text) + 1)
    )


def words(draw: np.random.Generator, count: int) -> str:
    """Returns a text of random words."""
    return " ".join(_WORDS[index] for index in draw.integers(0, len(_WORDS), count).tolist())


def drawn_texts(workload: Workload, counts: TokenCounts) -> list[tuple[Prompt, int]]:
    """Returns texts of random words for a workload, each with its number of output tokens."""
    draw = np.random.default_rng(workload.seed)
    common = ""
    if workload.common_tokens:
        common = _text(draw, counts.characters(workload.common_tokens))
    return [
        (_text(draw, counts.characters(prompt), begin=common), output)
        for prompt, output in workload.draw_lengths(draw)
    ]


def drawn_ids(workload: Workload, vocab_size: int) -> list[tuple[Prompt, int]]:
    """Returns the token ids that `jaxkv bench throughput` draws for the same workload."""
    prompts: Sequence[tuple[Prompt, int]] = workload.draw_ids(vocab_size)
    return list(prompts)


def _text(draw: np.random.Generator, characters: int, *, begin: str = "") -> str:
    """Returns random words behind `begin`, to the nearest word of a length."""
    parts, length = [begin] if begin else [], len(begin)
    while not parts or characters - length > 2:
        word = _WORDS[int(draw.integers(0, len(_WORDS)))]
        parts.append(word)
        length += len(word) + (len(parts) > 1)
    return " ".join(parts)

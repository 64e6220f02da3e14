"""A grammar of the simulated model: which tokens may follow is a function of the tokens before, computed by hashing."""

import numpy as np

from jaxkv.sampling.token_mask import mask_of, num_words
from jaxkv.structured.grammar import Grammar
from jaxkv.structured.shared_masks import SharedMasks
from tests.engine.simulated_text import VOCAB, fold

SHARED = SharedMasks()


def allowed_after(key, tokens):
    """Returns the tokens that may follow: often a single one, and none behind the end of the text."""
    if len(tokens) >= 3 + key % 30:
        return []
    mixed = fold(key, [*tokens, len(tokens)])
    if mixed % 3 == 0:
        return [mixed % VOCAB]
    return [token for token in range(VOCAB) if fold(mixed, [token]) % 4 == 0] or [mixed % VOCAB]


class HashMatcher:
    """Follows `allowed_after` with the methods of llguidance's matcher. Every text is complete.

    Args:
        key: chooses the grammar.
        fails_after: reports an error from so many tokens on, like a limit that is exceeded.
    """

    def __init__(self, key, fails_after=None):
        self.key, self.fails_after = key, fails_after
        self.tokens, self.wrong = [], False

    def deep_copy(self):
        return HashMatcher(self.key, self.fails_after)

    def reset(self):
        self.tokens = []
        return True

    def consume_tokens(self, tokens):
        for token in tokens:
            self.wrong |= token not in allowed_after(self.key, self.tokens)
            self.tokens.append(token)
        return not self.wrong

    def compute_ff_tokens(self):
        forced = []
        while len(allowed := allowed_after(self.key, [*self.tokens, *forced])) == 1:
            forced += allowed
        return forced

    def is_accepting(self):
        return True

    def is_stopped(self):
        return not allowed_after(self.key, self.tokens)

    def is_error(self):
        return self.wrong or (self.fails_after is not None and len(self.tokens) >= self.fails_after)

    def get_error(self):
        return "a token that is not allowed" if self.wrong else "too complex"


def fill(matchers, masks):
    for matcher, mask in zip(matchers, masks, strict=True):
        mask[:] = mask_of(allowed_after(matcher.key, matcher.tokens), mask.size)


def grammar_of(key, fails_after=None):
    """Returns the grammar of a key."""
    nothing = np.zeros(num_words(VOCAB), np.uint32)
    return Grammar(HashMatcher(key, fails_after), VOCAB, (), nothing, fill, SHARED)

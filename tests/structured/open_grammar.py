"""A grammar that allows every token, so that a request with it gets the tokens of one without."""

from dataclasses import replace

import numpy as np

from jaxkv import StructuredOutputs
from jaxkv.sampling.token_mask import num_words
from jaxkv.structured.grammar import Grammar
from jaxkv.structured.shared_masks import SharedMasks

ALL = np.uint32(0xFFFFFFFF)


class OpenMatcher:
    """Allows every token after every text."""

    def deep_copy(self):
        return self

    def reset(self):
        return True

    def consume_tokens(self, tokens):
        return True

    def compute_ff_tokens(self):
        return []

    def is_accepting(self):
        return True

    def is_stopped(self):
        return False

    def is_error(self):
        return False

    def get_error(self):
        return ""


def fill(matchers, masks):
    masks[:] = ALL


def with_open_grammar(request, vocab_size):
    """Returns the request with such a grammar."""
    params = replace(request.params, structured_outputs=StructuredOutputs(regex="any text"))
    nothing = np.zeros(num_words(vocab_size), np.uint32)
    grammar = Grammar(OpenMatcher(), vocab_size, (), nothing, fill, SharedMasks())
    return replace(request, params=params, grammar=grammar)

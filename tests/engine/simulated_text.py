"""The simulated model: the chain of a text, and the next token computed from it."""

from collections.abc import Iterable

import numpy as np

VOCAB = 61
_CHAIN, _WORD = 0xFFFFFF, 0xFFFFFFFF
"""A chain has 24 bits, which a float32 holds exactly."""


def link(chain, token):
    """Returns the chain of a text that goes on with a token; numbers or arrays of int64."""
    return ((chain * 1103 + token * 7919 + 12345) ^ (chain >> 11)) & _CHAIN


def fold(mixed, numbers):
    for number in numbers:
        mixed = ((mixed * 69069 + int(number) * 40503 + 1) ^ (mixed >> 7)) & _WORD
    return mixed


def weigh(chain, *, seed=None, counts=None, biases: Iterable[tuple[int, float]] = ()):
    """Returns what decides a row's next token.

    Args:
        chain: of its text.
        seed: the two halves of its seed, if it draws.
        counts: how often it has each token in its output, and whether its prompt has it, if it penalises them.
        biases: what it adds to which tokens.
    """
    mixed = chain if seed is None else fold(chain, [half & _WORD for half in seed])
    if counts is not None:
        output, seen = counts
        places = np.arange(VOCAB)
        mixed = fold(mixed, [np.dot(places + 1, output), np.dot(places + 3, seen)])
    bias = sum(
        int(token) * 100 + int(np.float32(max(value, -1e6)) * 10)
        for token, value in biases
        if value
    )
    return fold(mixed, [bias]) if bias else mixed


def choose(mixed, forbidden=()):
    """Returns the token that is chosen and its log-probability, which is made up."""
    token = (mixed >> 3) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token, mixed % 1000 / 1000


def is_finite(chain, broken_every):
    """Whether logits are numbers: those of every n-th chain are not; 0 is never."""
    return not (broken_every and chain % broken_every == 0)


def chains_of(chain, tokens):
    """Returns the chain before some tokens, and after each."""
    chains = [chain]
    for token in tokens:
        chains.append(link(chains[-1], token))
    return chains

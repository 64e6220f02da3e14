"""Masks of allowed tokens: 32 tokens per word, bit b of word w for token `32 * w + b`. Imports no JAX."""

from collections.abc import Iterable

import numpy as np


def num_words(vocab_size: int) -> int:
    """Returns the number of words of a mask over `vocab_size` tokens."""
    return -(-vocab_size // 32)


def mask_of(tokens: Iterable[int], words: int) -> np.ndarray:
    """Returns the mask, uint32 `[words]`, with the bits of some tokens; tokens past its end are left out."""
    bits = np.zeros(32 * words, np.uint8)
    ids = np.fromiter(tokens, np.int64)
    bits[ids[ids < bits.size]] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

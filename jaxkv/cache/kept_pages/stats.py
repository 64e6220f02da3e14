"""Counts of what the prefix index found, kept and evicted."""

from dataclasses import dataclass


@dataclass
class PrefixStats:
    """Counts since the index was made.

    Attributes:
        hits: sequences that began with cached tokens.
        misses: sequences that began without cached tokens.
        tokens_reused: cached tokens that sequences skipped.
        tokens_computed: tokens that sequences computed because they were not cached.
        evictions: pages evicted.
        tokens_without_states: computed tokens whose pages were cached, but without a checkpoint after them.
        short_of_states: sequences with such tokens.
        checkpoints: checkpoints made.
        checkpoints_dropped: checkpoints not made for lack of room or of a page that they need.
        checkpoint_evictions: checkpoints evicted.
        deferrals: sequences delayed until another one had made a checkpoint.
    """

    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    evictions: int = 0
    tokens_without_states: int = 0
    short_of_states: int = 0
    checkpoints: int = 0
    checkpoints_dropped: int = 0
    checkpoint_evictions: int = 0
    deferrals: int = 0

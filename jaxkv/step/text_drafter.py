"""`TextDrafter`: guesses the next tokens from the texts that the device keeps, such as `NgramLookup`, prompt lookup."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@runtime_checkable
class TextDrafter(Protocol):
    """Guesses tokens on the device, inside a trace, so that the next step needs none from the host.

    A part of a program's key, so it must be hashable, and equal only to those that guess the same.
    """

    def draft(
        self, texts: Int[Array, "rows max_tokens"], lengths: Int[Array, " rows"], most: int, /
    ) -> Int[Array, "rows most"]:
        """Returns `most` guesses for each row, all of them ids of the vocabulary, right or not.

        Args:
            texts: ids of prompt and output; anything behind the first `lengths`.
            lengths: tokens of each row; 0 for padding.
            most: number of guesses of a row; static.
        """
        ...


@dataclass(frozen=True)
class NoGuesses:
    """Guesses nothing: a program behind the step writes the drafts, such as that of a smaller model."""

    def draft(
        self, texts: Int[Array, "rows max_tokens"], lengths: Int[Array, " rows"], most: int, /
    ) -> Int[Array, "rows most"]:
        """Returns zeros."""
        del texts
        return jnp.zeros((lengths.shape[0], most), jnp.int32)


@dataclass(frozen=True)
class NgramLookup:
    """Prompt lookup (Saxena, 2023): the tokens behind the last earlier place that has the same n tokens.

    The longest n comes first. Where the text ends before the guesses do, what comes between the two places is repeated.
    A text whose end was not seen before repeats its last token.

    Attributes:
        longest: most tokens that must be equal.
        shortest: fewest tokens that must be equal.
    """

    longest: int
    shortest: int

    def draft(
        self, texts: Int[Array, "rows max_tokens"], lengths: Int[Array, " rows"], most: int, /
    ) -> Int[Array, "rows most"]:
        """Returns the guesses, see `TextDrafter.draft`."""
        last = jnp.maximum(lengths - 1, 0)
        columns = jnp.arange(texts.shape[1], dtype=jnp.int32)[None, :]
        equal = jnp.zeros(texts.shape, jnp.int32)
        run = (columns < last[:, None]) & (columns >= 0)
        for back in range(self.longest):
            run = run & _equals_end(texts, last, columns, back)
            equal = equal + run.astype(jnp.int32)
        # The longest match first, and of several the last one.
        rank = jnp.where(equal >= self.shortest, equal * texts.shape[1] + columns, -1)
        found = jnp.argmax(rank, axis=1).astype(jnp.int32)
        found = jnp.where(jnp.max(rank, axis=1) >= 0, found, last - 1)
        period = jnp.maximum(last - found, 1)
        steps = jnp.arange(most, dtype=jnp.int32)[None, :] % period[:, None]
        places = jnp.maximum(found[:, None] + 1 + steps, 0)
        return jnp.take_along_axis(texts, places, axis=1)


def _equals_end(
    texts: Int[Array, "rows max_tokens"],
    last: Int[Array, " rows"],
    columns: Int[Array, "1 max_tokens"],
    back: int,
) -> Bool[Array, "rows max_tokens"]:
    """Returns whether the token `back` before each column equals the one `back` before the end of its row."""
    end = jnp.take_along_axis(texts, jnp.maximum(last - back, 0)[:, None], axis=1)
    earlier = jnp.roll(texts, back, axis=1)
    return (earlier == end) & (columns >= back) & (last >= back)[:, None]

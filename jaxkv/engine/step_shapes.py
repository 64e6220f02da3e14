"""The padded shapes of the engine's steps: few enough to compile all of them, close enough to waste little.

Steps of one token per row are "decode" programs. All others are "prefill" programs, padded by no more than
`MOST_PADDING`, for which the scheduler cuts prompts; there rows and tables cost little and have coarse sizes.
"""

from collections.abc import Sequence

from jaxkv.batch import Features
from jaxkv.cache.spec import CacheLayout
from jaxkv.engine.buckets import (
    bucket,
    coarse_buckets,
    filled,
    power_of_two_buckets,
    token_buckets,
)
from jaxkv.engine.fields import StepShape
from jaxkv.engine.rows import Row, features_of
from jaxkv.engine.shapes import Declared

_SHORTEST_TABLE = 512
_TABLE_FACTOR = 4
_ROW_FACTOR = 8


class StepShapes:
    """The buckets of one engine.

    Args:
        layout: the cache's groups.
        max_tokens: longest sequence.
        max_rows: most sequences of a step.
        token_budget: most tokens of a step.
        whole_prompts: prompts cannot be cut, so that more sizes are needed to pad them little.
        pinned: one shape serves every step, so that neighbours and cuts do not change a bit of any result.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        max_tokens: int,
        max_rows: int,
        token_budget: int,
        whole_prompts: bool,
        pinned: bool = False,
    ) -> None:
        most = max(token_budget, max_tokens) if whole_prompts else token_budget
        self._paged = layout.paged_groups
        self.pinned = pinned
        self.token_buckets = token_buckets(most, per_octave=4 if whole_prompts else 2)
        self.decode_rows = power_of_two_buckets(1, max_rows)
        self.prefill_rows = coarse_buckets(min(_ROW_FACTOR, max_rows), max_rows, _ROW_FACTOR)
        self.lengths = coarse_buckets(_SHORTEST_TABLE, max_tokens, _TABLE_FACTOR)

    def fill(self, least: int, most: int) -> int | None:
        """Returns how many tokens a step should have; see `filled`."""
        return filled(least, most, self.token_buckets)

    def declare(self, rows: Sequence[Row], *, total_tokens: int) -> Declared:
        """Returns the program that runs these rows, whose tables cover `total_tokens` tokens each."""
        new_tokens = [len(row.tokens) for row in rows]
        features = features_of(rows)
        if self.pinned:
            return self._largest(features)
        length = bucket(total_tokens, self.lengths)
        if max(new_tokens) == 1:
            return self._decode(bucket(len(rows), self.decode_rows), length, features)
        tokens = bucket(sum(new_tokens), self.token_buckets)
        return self._prefill(tokens, bucket(len(rows), self.prefill_rows), length, features)

    def declare_all(
        self,
        features: Features,
        *,
        rows: int | None = None,
        new_tokens: int | None = None,
        total_tokens: int | None = None,
    ) -> list[Declared]:
        """Lists every step program that rows of these features can need.

        Args:
            features: how rows choose their tokens.
            rows: most rows at once; as many as may run, if not given.
            new_tokens: most tokens of a step; the budget, if not given.
            total_tokens: longest sequence; the longest there may be, if not given.
        """
        if self.pinned:
            return [self._largest(features)]
        lengths = _up_to(total_tokens, self.lengths)
        decode = [
            self._decode(count, length, features)
            for count in _up_to(rows, self.decode_rows)
            for length in lengths
        ]
        return decode + [
            self._prefill(tokens, count, length, features)
            for tokens in _up_to(new_tokens, self.token_buckets)
            for count in _up_to(rows, self.prefill_rows)
            for length in lengths
        ]

    def _largest(self, features: Features) -> Declared:
        sizes = self.token_buckets[-1], self.prefill_rows[-1], self.lengths[-1]
        return self._prefill(*sizes, features)

    def _decode(self, rows: int, length: int, features: Features) -> Declared:
        shape = StepShape(rows, rows, self._widths(length), features, decode=True)
        return Declared("decode", shape)

    def _prefill(self, tokens: int, rows: int, length: int, features: Features) -> Declared:
        return Declared("prefill", StepShape(tokens, rows, self._widths(length), features))

    def _widths(self, length: int) -> tuple[int, ...]:
        return tuple(group.pages_for(length) for group in self._paged)


def _up_to(most: int | None, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes that serve up to `most`, or more than the largest holds: all of them."""
    if most is None or most >= sizes[-1]:
        return sizes
    return tuple(size for size in sizes if size <= bucket(most, sizes))

"""The padded shapes of the engine's steps: few enough to compile all of them, close enough to waste little.

Steps of one token per row are "decode" programs. All others are "prefill" programs, for which the scheduler cuts
prompts. Neither has more than `MOST_PADDING` padded tokens per real one above `LOOSE_TOKENS`; how fine the sizes are
where that promises nothing is the `Grain`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxkv.cache.spec import CacheLayout
from jaxkv.runner.buckets import (
    LOOSE_TOKENS,
    bucket,
    coarse_buckets,
    filled,
    row_buckets,
    token_buckets,
)
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import LOGPROB_SIZES, features_of

_SNAPSHOTS_PER_ROW = 3
_MOST_SNAPSHOTS = 16
"""States that a prefill program can keep on its way; a step that could keep more leaves the others out."""


@dataclass(frozen=True)
class Grain:
    """How fine the sizes are where `MOST_PADDING` leaves it open.

    Attributes:
        fewest_tokens: of a prefill program.
        whole_up_to: prompts of up to so many tokens that are alone need not be cut to be padded little.
        row_factor: between the sizes of small decode programs.
        shortest_table: tokens that the shortest tables cover.
        table_factor: between the lengths of tables.
    """

    fewest_tokens: int
    whole_up_to: int
    row_factor: int
    shortest_table: int
    table_factor: int


FINE = Grain(
    fewest_tokens=16, whole_up_to=LOOSE_TOKENS, row_factor=2, shortest_table=512, table_factor=4
)
"""For XLA alone, which computes whatever is padded, and gathers every page that a table could name."""

COARSE = Grain(fewest_tokens=64, whole_up_to=256, row_factor=4, shortest_table=2048, table_factor=8)
"""For kernels that skip what is padded, on a GPU that takes as long to read the weights for 64 tokens as for one.

A second step for the rest of a short prompt would take as long as the first.
"""


def grain_of(implementation: str) -> Grain:
    """Returns the grain that suits what runs a model's ops."""
    return FINE if implementation == "xla" else COARSE


def settle_budget(token_budget: int, *, max_tokens: int, max_rows: int) -> int:
    """Returns the most tokens of a step: what was asked for, if so many can come together, and one for every row."""
    return max(max_rows, min(token_budget, max_rows * max_tokens))


class StepShapes:
    """The buckets of one engine.

    Args:
        layout: the cache's groups.
        max_tokens: longest sequence.
        max_rows: most sequences of a step.
        token_budget: most tokens of a step.
        whole_prompts: prompts cannot be cut, so that more sizes are needed to pad them little.
        pinned: one program serves every step, so that neighbours and cuts do not change a bit of any result.
        grain: how fine the sizes are.
        checkpoints: prefill programs keep states of recurrent layers on their way.
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
        grain: Grain = FINE,
        checkpoints: bool = False,
    ) -> None:
        most = max(token_budget, max_tokens) if whole_prompts else token_budget
        self._paged = layout.paged_groups
        self.pinned = pinned
        self._keeps = checkpoints
        self._expands = layout.expands
        self._everything = _all_features(layout)
        self.token_buckets = token_buckets(
            most,
            per_octave=4 if whole_prompts else 2,
            minimum=grain.fewest_tokens,
            fine_up_to=grain.whole_up_to,
        )
        self.decode_rows = row_buckets(max_rows, grain.row_factor)
        self._max_rows = max_rows
        self.token_budget = token_budget
        """Most tokens of a step."""
        self.lengths = coarse_buckets(grain.shortest_table, max_tokens, grain.table_factor)

    def fill(self, least: int, most: int) -> int | None:
        """Returns how many tokens a step should have; see `filled`."""
        return filled(least, most, self.token_buckets)

    def declare(self, rows: Sequence[Row], *, total_tokens: int) -> StepSpec:
        """Returns the program that runs these rows, whose tables cover `total_tokens` tokens each."""
        new_tokens = sum(len(row.tokens) for row in rows)
        return self.choose(
            len(rows),
            new_tokens,
            features_of(rows),
            total_tokens=total_tokens,
            fresh=all(row.start == 0 for row in rows),
        )

    def choose(
        self,
        rows: int,
        new_tokens: int,
        features: Features,
        *,
        total_tokens: int,
        mixed: bool = False,
        fresh: bool = False,
    ) -> StepSpec:
        """Returns the program for so many rows with so many new tokens between them; see `declare`.

        With `mixed`, some rows have no new token, and so others may have several. With `fresh`, all rows begin at
        their first token.
        """
        if self.pinned:
            return self._largest()
        length = bucket(total_tokens, self.lengths)
        if new_tokens == rows and not mixed:
            return self._decode(bucket(rows, self.decode_rows), length, features)
        tokens = bucket(max(new_tokens, rows), self.token_buckets)
        if fresh and tokens <= self._expands:
            return self._fresh(tokens, features)
        return self._prefill(tokens, length, features)

    def declare_all(
        self,
        features: Features,
        *,
        rows: int | None = None,
        new_tokens: int | None = None,
        total_tokens: int | None = None,
    ) -> list[StepSpec]:
        """Lists every step program that rows of these features can need.

        Args:
            features: how rows choose their tokens.
            rows: most rows at once; as many as may run, if not given.
            new_tokens: most tokens of a step; the budget, if not given.
            total_tokens: longest sequence; the longest there may be, if not given.
        """
        if self.pinned:
            return [self._largest()]
        lengths = _up_to(total_tokens, self.lengths)
        decode = [
            self._decode(count, length, features)
            for count in _up_to(rows, self.decode_rows)
            for length in lengths
        ]
        sizes = _up_to(new_tokens, self.token_buckets)
        fresh = [self._fresh(tokens, features) for tokens in sizes if tokens <= self._expands]
        return (
            decode
            + fresh
            + [self._prefill(tokens, length, features) for tokens in sizes for length in lengths]
        )

    def _largest(self) -> StepSpec:
        return self._prefill(self.token_buckets[-1], self.lengths[-1], self._everything)

    def _decode(self, rows: int, length: int, features: Features) -> StepSpec:
        return StepSpec(rows, rows, self._widths(length), features, decode=True)

    def _fresh(self, tokens: int, features: Features) -> StepSpec:
        # Its tables are not read, so that those of the longest sequences cost it nothing.
        return replace(self._prefill(tokens, self.lengths[-1], features), fresh=True)

    def _prefill(self, tokens: int, length: int, features: Features) -> StepSpec:
        # So few tokens cannot be of more rows, and where there are many, choosing for every row adds little.
        rows = min(tokens, self._max_rows)
        kept = min(_SNAPSHOTS_PER_ROW * rows, _MOST_SNAPSHOTS) if self._keeps else 0
        return StepSpec(tokens, rows, self._widths(length), features, snapshots=kept)

    def _widths(self, length: int) -> tuple[int, ...]:
        return tuple(group.pages_for(length) for group in self._paged)


def _all_features(layout: CacheLayout) -> Features:
    """Returns all that rows could ask for, with penalties if the cache has room for their counts."""
    specs = [array for group in layout.in_place_groups for array in group.spec.arrays]
    return Features(
        draws=True,
        filters=True,
        penalties=any(array.role == "output_counts" for array in specs),
        min_tokens=True,
        logprobs=LOGPROB_SIZES[-1],
    )


def _up_to(most: int | None, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes that serve up to `most`, or more than the largest holds: all of them."""
    if most is None or most >= sizes[-1]:
        return sizes
    return tuple(size for size in sizes if size <= bucket(most, sizes))

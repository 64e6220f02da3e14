"""The padded shapes of the engine's steps: few enough to compile all of them, close enough for little padding.

Steps of one token per row run as "decode" programs, all others as "prefill" programs. The scheduler cuts prompts to
fill prefill programs. Above `LOOSE_TOKENS` tokens, a step has at most `MOST_PADDING` padded tokens per real one. A
`Grain` sets how fine the other sizes are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from jaxkv.cache.spec import CacheLayout
from jaxkv.runner.buckets import (
    LOOSE_TOKENS,
    bucket,
    coarse_buckets,
    filled,
    mask_buckets,
    power_of_two_buckets,
    token_buckets,
)
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Row
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.runner.shared_rows import FEWEST_PROGRAM_ROWS, may_save
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import LOGPROB_SIZES, features_of
from jaxkv.step.text_drafter import TextDrafter

_CHECKPOINTS_PER_ROW = 3
_MOST_CHECKPOINTS = 16
"""Most pending state checkpoints of a prefill program; further ones of a step are left out."""


@dataclass(frozen=True)
class Grain:
    """How fine those sizes are that `MOST_PADDING` does not determine.

    Attributes:
        fewest_tokens: tokens of the smallest prefill program.
        whole_up_to: up to this many tokens, a single prompt runs in one step with little padding.
        shortest_table: tokens that the shortest page tables cover.
        table_factor: ratio of the lengths of successive page tables.
    """

    fewest_tokens: int
    whole_up_to: int
    shortest_table: int
    table_factor: int


FINE = Grain(fewest_tokens=16, whole_up_to=LOOSE_TOKENS, shortest_table=512, table_factor=4)
"""For XLA, which computes padding and gathers all pages of a page table, in all layers or in those with wide heads."""

COARSE = Grain(fewest_tokens=64, whole_up_to=256, shortest_table=2048, table_factor=8)
"""For kernels that skip padding, on a GPU where a step of 64 tokens takes little longer than one of a single token.

Reading the weights dominates both, so a second step for the rest of a short prompt would cost as much as the first.
"""


def grain_of(layout: CacheLayout, implementation: str) -> Grain:
    """Returns the grain for an implementation of the model's ops on a cache of this layout."""
    return FINE if implementation == "xla" or layout.has_wide_heads else COARSE


def may_share_keys(layout: CacheLayout, implementation: str, *, batch_invariant: bool) -> bool:
    """Returns whether decode programs come in a second form, which reads keys once that rows share.

    Args:
        layout: the cache's groups.
        implementation: the implementation of the model's ops; XLA reads all keys of each row.
        batch_invariant: whether no row's bits may depend on the others.
    """
    return implementation != "xla" and not batch_invariant and layout.shared_group is not None


_FEWEST_VERIFIED = 8
"""Tokens of the smallest program that verifies drafts: kernels compute rows of products by eights."""


def draft_counts(most: int) -> tuple[int, ...]:
    """Returns the numbers of drafts of a row that steps choose from, descending: `most`, half of it, and so on to 1."""
    return tuple(most >> halvings for halvings in range(most.bit_length()))


def clamp_token_budget(token_budget: int, *, max_tokens: int, max_rows: int) -> int:
    """Returns the token budget, clamped to [`max_rows`, `max_rows * max_tokens`]."""
    return max(max_rows, min(token_budget, max_rows * max_tokens))


class StepShapes:
    """The padded shapes of one engine.

    Args:
        layout: the cache's groups.
        max_tokens: longest sequence.
        max_rows: most sequences of a step.
        token_budget: most tokens of a step.
        whole_prompts: prompts cannot be cut, so more sizes are needed for little padding.
        pinned: the same two programs run every step, so that results do not depend on the batch, bit for bit.
        grain: how fine the sizes are.
        checkpoints: prefill programs write pending state checkpoints.
        lora: rows may name adapters.
        drafts: most drafts of a row in steps that verify them; 0 for no such steps.
        drafter: makes the next drafts at the end of such steps; `None` if the host makes them.
        shares: decode programs come in a second form, see `may_share_keys`.

    Attributes:
        token_buckets: tokens of prefill programs, ascending.
        decode_rows: rows of decode programs, ascending.
        token_budget: most tokens of a step.
        lengths: tokens that page tables cover, ascending.
        pinned: whether the same two programs run every step.
        drafts: most drafts of a row in steps that verify them; 0 for no such steps.
        drafter: makes the next drafts at the end of such steps; `None` if the host makes them.
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
        lora: bool = False,
        drafts: int = 0,
        drafter: TextDrafter | None = None,
        shares: bool = False,
    ) -> None:
        most = max(token_budget, max_tokens) if whole_prompts else token_budget
        self._paged = layout.paged_groups
        self.pinned = pinned
        self._checkpoints = checkpoints
        self._expands = layout.expands
        self._features = _all_features(layout, lora=lora)
        self.token_buckets = token_buckets(
            most,
            per_octave=4 if whole_prompts else 2,
            minimum=grain.fewest_tokens,
            fine_up_to=grain.whole_up_to,
        )
        # Every power of two up to 64: with rows to spare, attention divides each row among too few blocks.
        self.decode_rows = token_buckets(max_rows, per_octave=4, minimum=1)
        self._shared_bytes = 0
        if shares and not pinned and layout.shared_group is not None:
            self._shared_bytes = sum(array.nbytes for array in layout.shared_group.spec.arrays)
        self._sharing_rows = power_of_two_buckets(FEWEST_PROGRAM_ROWS, max_rows)
        self._max_rows = max_rows
        self.drafts, self.drafter = drafts, drafter
        self.token_budget = token_budget
        self.lengths = coarse_buckets(grain.shortest_table, max_tokens, grain.table_factor)
        # Finer than those of prompts: few drafts must cost less than many.
        self._verified = power_of_two_buckets(
            _FEWEST_VERIFIED, min(LOOSE_TOKENS, self.token_buckets[-1])
        )

    def fill(self, least: int, most: int) -> int | None:
        """Returns a number of tokens for a step in [`least`, `most`] that needs little padding; see `filled`."""
        return filled(least, most, self.token_buckets)

    def declare(self, rows: Sequence[Row], *, total_tokens: int) -> StepSpec:
        """Returns the program that runs these rows, with page tables of `total_tokens` tokens."""
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
        shares: bool = False,
    ) -> StepSpec:
        """Returns the program for a step. With features for grammars it is `forward_only`, and `sampler` is run next.

        Args:
            rows: number of rows.
            new_tokens: new tokens of all rows together.
            features: sampling features of the rows.
            total_tokens: tokens that the page tables must cover.
            mixed: some rows have no new token, so others may have several.
            fresh: all rows begin at their first token.
            shares: a decode step reads shared keys once; allowed where `may_share` says so.
        """
        if self.pinned:
            return self._largest()
        length = bucket(total_tokens, self.lengths)
        if new_tokens == rows and not mixed:
            if shares:
                rows = bucket(rows, self._sharing_rows)
                return _without_masks(self._decode(rows, length, features, shares=True))
            return _without_masks(self._decode(bucket(rows, self.decode_rows), length, features))
        tokens = bucket(max(new_tokens, rows), self.token_buckets)
        if fresh and tokens <= self._expands:
            return _without_masks(self._fresh(tokens, features))
        return _without_masks(self._prefill(tokens, length, features))

    def may_share(self, rows: int) -> bool:
        """Returns whether decode steps of so many rows may read shared keys once."""
        return may_save(rows, self.lengths[-1], self._shared_bytes)

    def sampler(self, shape: StepSpec, features: Features, masks: int) -> SampleSpec:
        """Returns the program that samples after a `forward_only` one.

        Args:
            shape: the spec of that program.
            features: sampling features of the rows.
            masks: number of different masks of rows with a grammar.
        """
        if self.pinned:
            features, masks = self._features, shape.rows
        if features.lora:
            features = replace(features, lora=False)
        return SampleSpec(shape.rows, features, bucket(max(masks, 1), mask_buckets(shape.rows)))

    def most_drafts(self, rows: int) -> int:
        """Returns the most drafts of each of so many rows that one step verifies; 0 if it verifies none.

        All tokens together then cost about as much as one of each row.
        """
        fitting = (count for count in draft_counts(self.drafts) if rows <= self._most_rows(count))
        return next(fitting, 0)

    def verify(
        self, rows: int, drafts: int, features: Features, *, total_tokens: int, masks: int = 0
    ) -> StepSpec:
        """Returns the program for a step that verifies drafts.

        Args:
            rows: number of rows.
            drafts: most drafts of a row, at most `most_drafts(rows)`.
            features: sampling features of the rows.
            total_tokens: tokens that the page tables must cover.
            masks: number of different masks of rows with a grammar.
        """
        counts = draft_counts(self.drafts)
        drafts = bucket(drafts, counts[::-1])
        rows = min(bucket(rows, self.decode_rows), self._most_rows(drafts))
        tokens = bucket(rows * (drafts + 1), self._verified)
        # One program for all numbers of drafts that have the same tokens.
        drafts = next(count for count in counts if rows * (count + 1) <= tokens)
        widths = self._widths(bucket(total_tokens, self.lengths))
        made = {"drafts": drafts, "drafter": self.drafter}
        return _with_masks(StepSpec(tokens, rows, widths, features, **made), masks)

    def _most_rows(self, drafts: int) -> int:
        """Returns the most rows of a step that verifies so many drafts of each."""
        return min(self._max_rows, self._verified[-1] // (drafts + 1))

    def declare_all(
        self,
        features: Features,
        *,
        rows: int | None = None,
        new_tokens: int | None = None,
        total_tokens: int | None = None,
    ) -> list[StepSpec | SampleSpec]:
        """Lists every program of steps that rows with these features can need.

        Args:
            features: sampling features of the rows.
            rows: most rows of a step; `None` for all rows.
            new_tokens: most new tokens of a step; `None` for the largest bucket.
            total_tokens: longest sequence; `None` for the longest possible.
        """
        if self.pinned:
            return [self._largest(), self.sampler(self._largest(), features, 0)]
        lengths = _up_to(total_tokens, self.lengths)
        decode = [
            self._decode(count, length, features)
            for count in _up_to(rows, self.decode_rows)
            for length in lengths
        ]
        most_rows, most_tokens = rows or self._max_rows, total_tokens or lengths[-1]
        decode += [
            self._decode(count, length, features, shares=True)
            for count in _up_to(rows, self._sharing_rows)
            for length in lengths
            if may_save(min(count, most_rows), min(length, most_tokens), self._shared_bytes)
        ]
        sizes = _up_to(new_tokens, self.token_buckets)
        fresh = [self._fresh(tokens, features) for tokens in sizes if tokens <= self._expands]
        verify = {
            self.verify(count, drafts, features, total_tokens=length): None
            for drafts in draft_counts(self.drafts)
            for count in range(1, min(rows or self._max_rows, self._most_rows(drafts)) + 1)
            for length in lengths
        }
        prefill = [
            self._prefill(tokens, length, features) for tokens in sizes for length in lengths
        ]
        if not features.grammar:
            return [*decode, *verify, *fresh, *prefill]
        verify = [several for shape in verify for several in _each_mask_bucket(shape, rows)]
        first = [_without_masks(shape) for shape in (*decode, *fresh, *prefill)]
        samplers = {
            self.sampler(shape, features, masks): None
            for shape in first
            for masks in _mask_counts(shape.rows, rows)
        }
        return [*verify, *first, *samplers]

    def _largest(self) -> StepSpec:
        return _without_masks(
            self._prefill(self.token_buckets[-1], self.lengths[-1], self._features)
        )

    def _decode(
        self, rows: int, length: int, features: Features, *, shares: bool = False
    ) -> StepSpec:
        widths = self._widths(length)
        return StepSpec(rows, rows, widths, features, decode=True, shares=shares)

    def _fresh(self, tokens: int, features: Features) -> StepSpec:
        # It does not read its page tables, so the longest tables cost nothing.
        return replace(self._prefill(tokens, self.lengths[-1], features), fresh=True)

    def _prefill(self, tokens: int, length: int, features: Features) -> StepSpec:
        # A step has at most one row per padded token. In a large step, sampling for the unused rows costs little.
        rows = min(tokens, self._max_rows)
        kept = min(_CHECKPOINTS_PER_ROW * rows, _MOST_CHECKPOINTS) if self._checkpoints else 0
        return StepSpec(tokens, rows, self._widths(length), features, pending_checkpoints=kept)

    def _widths(self, length: int) -> tuple[int, ...]:
        return tuple(group.pages_for(length) for group in self._paged)


def _all_features(layout: CacheLayout, *, lora: bool) -> Features:
    """Returns all sampling features; of penalties and processors those for which the cache has arrays."""
    roles = {array.role for group in layout.in_place_groups for array in group.spec.arrays}
    return Features(
        draws=True,
        filters=True,
        penalties="output_counts" in roles,
        min_tokens=True,
        grammar=True,
        processors="processor_words" in roles,
        logprobs=LOGPROB_SIZES[-1],
        logprobs_modes=True,
        lora=lora,
    )


def _with_masks(shape: StepSpec, masks: int) -> StepSpec:
    """Returns the program with room for so many masks, if its rows may have a grammar."""
    if not shape.features.grammar:
        return shape
    return replace(shape, masks=bucket(max(masks, 1), mask_buckets(shape.rows)))


@cache
def _without_masks(shape: StepSpec) -> StepSpec:
    """Returns the program that computes such a step as far as no masks are needed, if its rows may have a grammar."""
    if not shape.features.grammar:
        return shape
    return replace(shape, features=Features(lora=shape.features.lora), forward_only=True)


def _each_mask_bucket(shape: StepSpec, rows: int | None) -> list[StepSpec]:
    """Returns the program with each number of masks that up to `rows` rows can need; `None` for all of its rows."""
    return [replace(shape, masks=masks) for masks in _mask_counts(shape.rows, rows)]


def _mask_counts(most: int, rows: int | None) -> tuple[int, ...]:
    """Returns the padded numbers of masks of a program of `most` rows, used for up to `rows`; `None` for all."""
    return _up_to(most if rows is None else min(rows, most), mask_buckets(most))


def _up_to(most: int | None, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the buckets needed for sizes up to `most`; all of them if `most` is `None`."""
    if most is None or most >= sizes[-1]:
        return sizes
    return tuple(size for size in sizes if size <= bucket(most, sizes))

"""Which padded shape serves a set of rows, and when one program can stand in for another."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.cache.spec import CacheLayout
from jaxkv.engine.buckets import LOOSE_TOKENS, bucket, power_of_two_buckets
from jaxkv.engine.fields import StepShape
from jaxkv.engine.request import Request
from jaxkv.engine.rows import Row, features_of

_SPARE_ROWS = 8
"""Times the rows needed that a program may have and still be used in the place of one that is not compiled."""


@dataclass(frozen=True)
class Declared:
    """A program that requests of some kind will need.

    Attributes:
        kind: "generate", "prefill", "decode", "admit" or "score".
        shape: its padded sizes.
        width: columns of the output of "generate", or of the prompts of "admit".
    """

    kind: str
    shape: StepShape
    width: int = 0


def tokens_held(request: Request) -> int:
    """Returns how many tokens a request's pages must hold: the last generated one is never written."""
    return len(request.prompt) + request.params.max_tokens - 1


def serves(able: Declared, needed: Declared) -> bool:
    """Whether one program can stand in for another: as large in every size, and as able.

    Penalties must match, since rows without them would need clean entries in the sampling group.
    """
    a, b = able.shape, needed.shape
    return (
        able.kind == needed.kind
        and able.width >= needed.width
        and a.tokens >= b.tokens
        and a.rows >= b.rows
        and a.snapshots >= b.snapshots
        and a.steps == b.steps
        # A program that reads pages does so whether or not there is anything in them.
        and (b.fresh or not a.fresh)
        and len(a.table_widths) == len(b.table_widths)
        and all(x >= y for x, y in zip(a.table_widths, b.table_widths, strict=True))
        and a.features.penalties == b.features.penalties
        and (a.features.draws or not b.features.draws)
        and (a.features.filters or not b.features.filters)
        and (a.features.min_tokens or not b.features.min_tokens)
        and (b.features.logprobs is None or (a.features.logprobs or 0) >= b.features.logprobs)
        and (a.features.logprobs is not None or b.features.logprobs is None)
    )


def costs_alike(able: Declared, needed: Declared) -> bool:
    """Whether a program that serves as well saves a compilation that would not pay: few rows, and nothing else more."""
    a, b = able.shape, needed.shape
    return (
        a.tokens <= LOOSE_TOKENS
        and a.rows <= _SPARE_ROWS * b.rows
        and a.table_widths == b.table_widths
        and a.features == b.features
        and a.fresh == b.fresh
    )


class Shapes:
    """The buckets of one cache.

    Args:
        layout: the cache's groups.
        max_tokens: longest sequence.
        max_rows: most sequences of a step.
    """

    def __init__(self, layout: CacheLayout, *, max_tokens: int, max_rows: int) -> None:
        self.layout = layout
        self.max_rows = max_rows
        self.row_buckets = power_of_two_buckets(1, max_rows)
        self.token_buckets = power_of_two_buckets(16, max_rows * max_tokens)
        self.length_buckets = power_of_two_buckets(16, max_tokens)

    def shape(
        self, rows: Sequence[Row], *, total_tokens: int, decode: bool = False, loop: bool = False
    ) -> StepShape:
        """Returns the smallest shape that serves `rows`, whose tables cover `total_tokens` tokens each."""
        count = bucket(len(rows), self.row_buckets)
        new_tokens = sum(len(row.tokens) for row in rows)
        length = bucket(total_tokens, self.length_buckets)
        tokens = count if decode else bucket(new_tokens, self.token_buckets)
        fresh = all(row.start == 0 for row in rows) and tokens <= self.layout.expands
        return StepShape(
            tokens=tokens,
            rows=count,
            table_widths=tuple(group.pages_for(length) for group in self.layout.paged_groups),
            features=features_of(rows),
            decode=decode,
            loop=loop,
            fresh=fresh and not decode,
        )

    def width(self, max_tokens: int) -> int:
        """Returns the columns that hold `max_tokens` tokens."""
        return bucket(max_tokens, self.length_buckets)

    def loop(self, rows: Sequence[Row], requests: Sequence[Request]) -> Declared:
        """Returns the "generate" program of a fixed batch."""
        total = max(tokens_held(request) for request in requests)
        width = self.width(max(request.params.max_tokens for request in requests))
        return Declared("generate", self.shape(rows, total_tokens=total, loop=True), width)

    def admit(self, rows: Sequence[Row], generated: Sequence[Sequence[int]] = ()) -> Declared:
        """Returns the program that gives these rows clean entries in the sampling group; "readmit" if some come back.

        Args:
            rows: `tokens` are whole prompts.
            generated: per row, what it has generated already.
        """
        count = bucket(len(rows), self.row_buckets)
        outputs = max((len(tokens) for tokens in generated), default=0)
        width = self.width(max(outputs, *(len(row.tokens) for row in rows)))
        return Declared("readmit" if outputs else "admit", StepShape(count, count, ()), width)

    def score(self, row: Row) -> Declared:
        """Returns the program that scores one text, or a part of it."""
        return Declared("score", self.shape([row], total_tokens=row.start + len(row.tokens)))


def row_of(request: Request, sequence: int) -> Row:
    """Describes a request's whole prompt as one row."""
    return Row(
        sequence=sequence,
        tokens=request.prompt,
        start=0,
        params=request.params,
        seed=request.seed,
        max_tokens=request.params.max_tokens,
        stop_ids=request.stop_ids,
    )

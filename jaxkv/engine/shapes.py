"""Which padded shape serves a set of rows, and which programs a kind of request will need. Compiles nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxkv.cache.spec import CacheLayout
from jaxkv.config import SamplingParams
from jaxkv.engine.buckets import bucket, power_of_two_buckets
from jaxkv.engine.fields import StepShape
from jaxkv.engine.rows import Row, features_of

PREFILL_CHUNK = 2048
"""Most prompt tokens of one step of a stream; longer prompts take several."""


@dataclass(frozen=True)
class Declared:
    """A program that requests of some kind will need.

    Attributes:
        kind: "generate", "prefill" or "decode".
        shape: its padded sizes.
        width: columns of the output of a "generate" program; 0 for the others.
    """

    kind: str
    shape: StepShape
    width: int = 0


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
        return StepShape(
            tokens=count if decode else bucket(new_tokens, self.token_buckets),
            rows=count,
            table_widths=tuple(group.pages_for(length) for group in self.layout.paged_groups),
            features=features_of(rows),
            decode=decode,
            loop=loop,
        )

    def width(self, max_tokens: int) -> int:
        """Returns the columns of the output that hold `max_tokens` generated tokens."""
        return bucket(max_tokens, self.length_buckets)

    def declare(
        self, *, batch: int, prompt_tokens: int, sampling: SamplingParams
    ) -> list[Declared]:
        """Lists what `LLM.generate` and `LLM.stream` need for requests like these, each program once.

        Args:
            batch: prompts of one `generate` call.
            prompt_tokens: tokens of each prompt.
            sampling: how their tokens are chosen; `max_tokens` counts too.
        """
        row = Row(0, (0,) * prompt_tokens, 0, sampling, max_tokens=sampling.max_tokens)
        total = prompt_tokens + sampling.max_tokens - 1
        needed = [
            Declared(
                "generate",
                self.shape([row] * batch, total_tokens=total, loop=True),
                self.width(sampling.max_tokens),
            )
        ]
        for start in range(0, prompt_tokens, PREFILL_CHUNK):
            chunk = replace(row, tokens=row.tokens[start : start + PREFILL_CHUNK])
            needed.append(Declared("prefill", self.shape([chunk], total_tokens=total)))
        one = replace(row, tokens=(0,))
        needed.append(Declared("decode", self.shape([one], total_tokens=total, decode=True)))
        return list(dict.fromkeys(needed))

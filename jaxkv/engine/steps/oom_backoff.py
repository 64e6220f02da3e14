"""Backoff after out-of-memory errors: records step shapes that failed, and cuts steps to smaller shapes."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from jaxkv.engine.steps.step_plan import Part, part_of, trim
from jaxkv.errors import OutOfMemory
from jaxkv.memory import is_out_of_memory
from jaxkv.runner.program_specs import StepSpec

_LOG = logging.getLogger(__name__)

_MOST_FAILURES = 2
"""A shape that runs out of memory this often, without a success in between, is not run again."""


class OomBackoff:
    """Records shapes that failed, and cuts a step until its shape is not one of them.

    After a step ran out of memory, only smaller steps run until one of them was read, since memory may be short for a
    moment only. Then its shape is tried once more. If it fails again, that shape and larger ones are not run any more,
    unless no smaller step is possible. A shape whose program was refused is not requested again.

    A step that cannot be made smaller fails its request after `_MOST_FAILURES` errors that left the cache intact.
    `RebuildLimit` counts the errors that lost the cache.

    Args:
        token_sizes, row_sizes: padded sizes of steps, ascending.
        whole: prompts cannot be cut.
        refusal: returns the error with which the program of a shape was refused; `None` if it was not.
    """

    def __init__(
        self,
        token_sizes: Sequence[int],
        row_sizes: Sequence[int],
        *,
        whole: bool,
        refusal: Callable[[StepSpec], Exception | None],
    ) -> None:
        self._sizes = sorted({*token_sizes, *row_sizes})
        self._whole = whole
        self._refusal = refusal
        self._counts: Counter[StepSpec] = Counter()
        # Of these failures, those that left the cache intact.
        self._harmless: Counter[StepSpec] = Counter()
        # Shapes that are not run any more because they ran out of memory.
        self._too_large: list[StepSpec] = []
        # Shape of the last step that ran out of memory; `None` once a later step was read.
        self._last_failed: StepSpec | None = None

    def note_failure(self, shape: StepSpec, error: Exception, *, lost: bool) -> bool:
        """Records a failed step; returns False if the error is neither out-of-memory nor a refused program.

        Args:
            shape: shape of the step.
            error: the error that it raised.
            lost: the cache was lost.
        """
        if not is_out_of_memory(error):
            return self._refusal(shape) is not None
        self._counts[shape] += 1
        self._harmless[shape] += not lost
        self._last_failed = shape
        if self._counts[shape] >= _MOST_FAILURES and shape not in self._too_large:
            self._too_large.append(shape)
            _LOG.warning("out of memory again: steps are smaller than %s from now on", shape)
        return True

    def note_success(self, shape: StepSpec) -> None:
        """Records that a step was read without an error."""
        self._last_failed = None
        if self._counts:
            self._counts.pop(shape, None)
            self._harmless.pop(shape, None)

    def avoids(self, shape: StepSpec) -> bool:
        """Whether a smaller step should run instead of one of this shape."""
        avoided = (
            self._too_large if self._last_failed is None else [*self._too_large, self._last_failed]
        )
        if any(_is_as_large(shape, other) for other in avoided):
            return True
        return self._refusal(shape) is not None

    def cut(
        self, parts: Sequence[Part], shape_of: Callable[[Sequence[Part]], StepSpec]
    ) -> tuple[Sequence[Part], StepSpec]:
        """Cuts a planned step to a shape that is not avoided, or to the smallest step; returns its parts and shape.

        Args:
            parts: the parts of the planned step; those at the end are cut or left out first.
            shape_of: returns the shape of a step of some parts.
        """
        shape = shape_of(parts)
        while self.avoids(shape):
            fewer = self._smaller(parts)
            if not fewer:
                break
            parts, shape = fewer, shape_of(fewer)
        return parts, shape

    def give_up(self, part: Part, shape: StepSpec) -> Exception | None:
        """Returns the error for a step that cannot be made smaller and must not run; `None` if it should be tried.

        It then forgets the failures of this shape, since memory may suffice for the next request.

        Args:
            part: the only part of the step.
            shape: shape of the step.
        """
        refusal = self._refusal(shape)
        if refusal is not None:
            return refusal
        count = self._harmless[shape]
        if count < _MOST_FAILURES:
            return None
        del self._counts[shape], self._harmless[shape]
        self._too_large.remove(shape)
        return OutOfMemory(
            f"out of memory {count} times in a step of {part.count} tokens of one sequence of "
            f"{part.start + part.count} tokens, padded to {shape.tokens} tokens, {shape.rows} rows and page tables of "
            f"{max(shape.table_widths, default=0)} pages; leave more memory beside the cache with a smaller "
            f"budget_bytes or memory_share of CacheConfig, or shorten the request"
        )

    def _smaller(self, parts: Sequence[Part]) -> list[Part]:
        """Returns the parts of the next smaller step; an empty list if there is none."""
        total = sum(part.count for part in parts)
        fits = max((size for size in self._sizes if size < total), default=total // 2)
        if self._whole:
            kept = list(parts[:-1])
            while sum(part.count for part in kept) > fits and len(kept) > 1:
                kept.pop()
            return kept
        wanted = [(part.sequence, part.count) for part in parts]
        trim(wanted, total - fits)
        if not total or not wanted:  # Parts that only sample have no tokens to cut.
            return list(parts[:-1])
        return [part_of(sequence, count) for sequence, count in wanted]


def _is_as_large(shape: StepSpec, other: StepSpec) -> bool:
    """Whether one shape is at least as large as the other in every size."""
    widths = zip(shape.table_widths, other.table_widths, strict=True)
    return (
        shape.tokens >= other.tokens
        and shape.rows >= other.rows
        and shape.steps >= other.steps
        # Programs that share the reads of keys take more memory.
        and shape.shares >= other.shares
        and all(one >= another for one, another in widths)
    )

"""Which steps were too large for the memory, or have no program, and what to run in their place.

Knows shapes and counts of failures; runs nothing.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from jaxkv.engine.step_plan import Part, part_of, trim
from jaxkv.errors import OutOfMemory
from jaxkv.memory import is_out_of_memory
from jaxkv.runner.program_specs import StepSpec

_LOG = logging.getLogger(__name__)

_MOST_FAILURES = 2
"""A shape that ran out of memory so often, and never ran in between, always does."""


class OomBackoff:
    """Remembers the shapes that failed, and cuts a step until it has one that did not.

    After a step ran out of memory, only smaller ones run until one of them has been read: memory may have been short
    for a moment. Then its shape is tried once more, and if that fails too, neither it nor a larger one ever again,
    unless there is no smaller one. A shape whose program cannot be had is not asked for twice.

    The smallest step is given up, with its request, when it failed as often and the cache was kept. Failures that cost
    the cache are another's to limit.

    Args:
        token_sizes, row_sizes: padded sizes of steps, ascending.
        whole: prompts cannot be cut.
        refusal: says why there will be no program of a shape, once it was asked for in vain.
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
        self._harmless: Counter[StepSpec] = Counter()
        self._too_large: list[StepSpec] = []
        self._wary_of: StepSpec | None = None

    @property
    def too_large(self) -> tuple[StepSpec, ...]:
        """Shapes that are not run any more, for want of memory."""
        return tuple(self._too_large)

    def note_failure(self, shape: StepSpec, error: Exception, *, lost: bool) -> bool:
        """Records why a step failed; returns False if neither memory nor its program is to blame.

        Args:
            shape: the step's.
            error: what it raised.
            lost: it cost the cache.
        """
        if not is_out_of_memory(error):
            return self._refusal(shape) is not None
        self._counts[shape] += 1
        self._harmless[shape] += not lost
        self._wary_of = shape
        if self._counts[shape] >= _MOST_FAILURES and shape not in self._too_large:
            self._too_large.append(shape)
            _LOG.warning("out of memory again: from now on steps are smaller than %s", shape)
        return True

    def note_success(self, shape: StepSpec) -> None:
        """Records that a step was read."""
        self._wary_of = None
        if self._counts:
            self._counts.pop(shape, None)
            self._harmless.pop(shape, None)

    def avoids(self, shape: StepSpec) -> bool:
        """Whether a smaller step should run in the place of one of this shape."""
        avoided = self._too_large if self._wary_of is None else [*self._too_large, self._wary_of]
        if any(_is_as_large(shape, other) for other in avoided):
            return True
        return self._refusal(shape) is not None

    def cut(
        self, parts: Sequence[Part], shape_of: Callable[[Sequence[Part]], StepSpec]
    ) -> tuple[Sequence[Part], StepSpec]:
        """Returns as many of these parts as may run in one step, and its shape; if none may, the smallest step.

        Args:
            parts: a step that was planned; those at the end are cut or left out first.
            shape_of: says in which shape parts would run.
        """
        shape = shape_of(parts)
        while self.avoids(shape):
            fewer = self._smaller(parts)
            if not fewer:
                break
            parts, shape = fewer, shape_of(fewer)
        return parts, shape

    def give_up(self, part: Part, shape: StepSpec) -> Exception | None:
        """Returns why a step that cannot be smaller will not run; `None` if it should be tried.

        Memory may be there for the next request, which tries anew.
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
            f"the memory does not suffice for a step of {part.count} tokens of one sequence that has "
            f"{part.start + part.count}, padded to {shape.tokens} tokens, {shape.rows} rows and tables of "
            f"{max(shape.table_widths, default=0)} pages: it ran out {count} times; leave more memory beside the "
            f"cache by a smaller budget_bytes or memory_share of CacheConfig, or shorten the request"
        )

    def _smaller(self, parts: Sequence[Part]) -> list[Part]:
        """Returns the parts of the next smaller step; none if there is no smaller one."""
        total = sum(part.count for part in parts)
        fits = max((size for size in self._sizes if size < total), default=total // 2)
        if self._whole:
            kept = list(parts[:-1])
            while sum(part.count for part in kept) > fits and len(kept) > 1:
                kept.pop()
            return kept
        wanted = [(part.sequence, part.count) for part in parts]
        trim(wanted, total - fits)
        if not total or not wanted:  # Prompts that are known to their end have no tokens to cut.
            return list(parts[:-1])
        return [part_of(sequence, count) for sequence, count in wanted]


def _is_as_large(shape: StepSpec, other: StepSpec) -> bool:
    """Whether a step of one shape needs at least the memory of the other, as far as sizes tell."""
    widths = zip(shape.table_widths, other.table_widths, strict=True)
    return (
        shape.tokens >= other.tokens
        and shape.rows >= other.rows
        and shape.steps >= other.steps
        and all(one >= another for one, another in widths)
    )

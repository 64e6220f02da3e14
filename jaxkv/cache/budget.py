"""From bytes of memory to pages and states per group, exact to the byte, and explained. Allocates nothing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxkv.cache.spec import CacheLayout, Group


@dataclass(frozen=True)
class Budget:
    """How a cache's memory is divided.

    Attributes:
        layout: the groups.
        counts: pages or states of each group, by name.
        budget_bytes: the memory that was given.
        max_sequences: sequences in flight at once.
        max_tokens: tokens of the longest sequence meant.
    """

    layout: CacheLayout
    counts: Mapping[str, int]
    budget_bytes: int
    max_sequences: int
    max_tokens: int

    @property
    def bytes(self) -> int:
        """Bytes the cache takes; never more than `budget_bytes`."""
        return sum(self.counts[group.name] * group.bytes_per_unit for group in self.layout.groups)

    @property
    def left_over(self) -> int:
        """Bytes too few for one more page, or for one more bundle of pages where groups have several page sizes."""
        return self.budget_bytes - self.bytes

    @property
    def num_tokens(self) -> int | None:
        """Tokens that fit, over all sequences; `None` when nothing is paged."""
        paged = self.layout.paged_groups
        return min((group.page_size * self.counts[group.name] for group in paged), default=None)

    @property
    def num_sequences(self) -> int:
        """Sequences of `max_tokens` that fit at once, at most `max_sequences`."""
        fit = (
            self.counts[group.name] // group.pages_for(self.max_tokens)
            for group in self.layout.paged_groups
        )
        return min((self.max_sequences, *fit))

    def explain(self) -> str:
        """Returns a table for people: bytes per token, per sequence and in all, for each group."""
        header = ("group", "layers", "count", "bytes/token", "bytes/sequence", "bytes")
        rows = [header, *(self._row(group) for group in self.layout.groups)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        tokens = "" if self.num_tokens is None else f"; {self.num_tokens:,} tokens fit"
        lines.append(
            f"{self.bytes:,} of {self.budget_bytes:,} bytes used, {self.left_over:,} left over{tokens}; "
            f"{self.num_sequences} of {self.max_sequences} sequences fit at {self.max_tokens:,} tokens each"
        )
        notes = {f"{g.name}: {note}": None for g in self.layout.groups for note in g.spec.notes}
        return "\n".join([*lines, *notes])

    def _row(self, group: Group) -> tuple[str, ...]:
        count = self.counts[group.name]
        return (
            group.name,
            str(len(group.layers)),
            f"{count:,} {group.unit}s",
            f"{bytes_per_token(group):,}",
            f"{bytes_per_sequence(group, self.max_tokens):,}",
            f"{count * group.bytes_per_unit:,}",
        )


def bytes_per_token(group: Group) -> int:
    """Returns what one more token costs in all the group's layers; 0 for states."""
    return group.bytes_per_unit // group.page_size if group.unit == "page" else 0


def bytes_per_sequence(group: Group, num_tokens: int) -> int:
    """Returns what a sequence of `num_tokens` holds in all the group's layers: whole pages, or one state."""
    units = group.pages_for(num_tokens) if group.unit == "page" else 1
    return units * group.bytes_per_unit


def checkpoint_bytes(layout: CacheLayout) -> int:
    """Returns what one checkpoint takes: a state of each recurrent group, over all layers."""
    return sum(group.bytes_per_unit for group in layout.state_groups)


def checkpoints_in(layout: CacheLayout, budget_bytes: int | None) -> int:
    """Returns how many checkpoints fit; `None` and 0 bytes keep none, and neither does a cache without such groups.

    Raises:
        ValueError: the bytes are negative, or too few for one.
    """
    each = checkpoint_bytes(layout)
    if not budget_bytes or not each:
        return 0
    if budget_bytes < each:
        raise ValueError(
            f"a checkpoint takes {each:,} bytes, so a budget of {budget_bytes:,} keeps none; give at least that, "
            f"or 0 to keep none on purpose"
        )
    return budget_bytes // each


def plan_budget(
    layout: CacheLayout,
    budget_bytes: int | None,
    *,
    max_sequences: int,
    max_tokens: int,
    checkpoints: int = 0,
) -> Budget:
    """Divides memory among the groups so that all paged groups hold the same number of tokens.

    State groups get one state per sequence and the zero state, and recurrent ones one more per checkpoint. What
    remains is pages, as many as fit.

    Args:
        layout: the groups, the sampling group included.
        budget_bytes: memory for the cache; `None` takes just what `max_sequences` sequences of `max_tokens` need.
        max_sequences: sequences in flight at once.
        max_tokens: tokens of the longest sequence meant.
        checkpoints: states that outlive their sequences, for prompts that begin alike.

    Raises:
        ValueError: the states and one page of each paged group do not fit.
    """
    if max_sequences < 1 or max_tokens < 1:
        raise ValueError(
            f"max_sequences and max_tokens must be at least 1, got {max_sequences}, {max_tokens}"
        )
    paged = layout.paged_groups
    counts = {group.name: max_sequences + 1 for group in layout.groups if group.unit == "state"}
    for group in layout.state_groups:
        counts[group.name] += checkpoints
    state_bytes = sum(g.bytes_per_unit * counts[g.name] for g in layout.groups if g.name in counts)
    # Pages come in the smallest bundles that hold equally many tokens in every group.
    bundle_tokens = math.lcm(*(group.page_size for group in paged))
    bundle_bytes = sum(bundle_tokens * bytes_per_token(group) for group in paged)
    if budget_bytes is None:
        bundles = max_sequences * -(-max_tokens // bundle_tokens)
        budget_bytes = state_bytes + bundles * bundle_bytes
    elif budget_bytes < state_bytes + bundle_bytes:
        raise ValueError(
            f"a cache for {max_sequences} sequences needs at least {state_bytes + bundle_bytes:,} bytes "
            f"({state_bytes:,} for states, {bundle_bytes:,} for the first {bundle_tokens} tokens of pages), "
            f"but the budget is {budget_bytes:,}; raise it, or lower max_sequences or page_size"
        )
    bundles = (budget_bytes - state_bytes) // bundle_bytes if paged else 0
    for group in paged:
        counts[group.name] = bundles * (bundle_tokens // group.page_size)
    return Budget(layout, counts, budget_bytes, max_sequences, max_tokens)

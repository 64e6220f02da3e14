"""From bytes of memory to pages and states per group, exact to the byte, and explained. Allocates nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxkv.cache.spec import CacheLayout, Group
from jaxkv.cache.windows import most_pages


@dataclass(frozen=True)
class Budget:
    """How a cache's memory is divided.

    Attributes:
        layout: the groups.
        counts: pages or states of each group, by name.
        budget_bytes: the memory that was given.
        max_sequences: sequences in flight at once.
        max_tokens: tokens of the longest sequence meant.
        ahead: tokens of steps under way, all sequences together, whose pages a window group needs beside those that
            its windows see; `None` if pages before a window are given back at a sequence's end alone.
    """

    layout: CacheLayout
    counts: Mapping[str, int]
    budget_bytes: int
    max_sequences: int
    max_tokens: int
    ahead: int | None = None

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
        """Tokens that fit, over all sequences, where nothing is given back; `None` when nothing is paged."""
        paged = self.layout.paged_groups
        whole = paged if self.ahead is None else [g for g in paged if g.window is None] or paged
        return min((group.page_size * self.counts[group.name] for group in whole), default=None)

    @property
    def num_sequences(self) -> int:
        """Sequences of `max_tokens` that fit at once, at most `max_sequences`."""
        fit = (self._fit(group, self.counts[group.name]) for group in self.layout.paged_groups)
        return min((self.max_sequences, *fit))

    def _fit(self, group: Group, pages: int) -> int:
        whole = pages // group.pages_for(self.max_tokens)
        if self.ahead is None or group.window is None:
            return whole
        beside = pages - _pages_ahead(group, self.ahead)
        return max(whole, beside // pages_per_sequence(group, self.max_tokens, self.ahead))

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
        for group in self.layout.paged_groups if self.ahead is not None else ():
            if group.window is not None:
                lines.append(
                    f"{group.name}: a sequence holds the last {group.window:,} tokens it sees and what steps under "
                    f"way write, up to {self.ahead:,} tokens over all sequences"
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
            f"{bytes_per_sequence(group, self.max_tokens, self.ahead):,}",
            f"{count * group.bytes_per_unit:,}",
        )


def bytes_per_token(group: Group) -> int:
    """Returns what one more token costs in all the group's layers; 0 for states."""
    return group.bytes_per_unit // group.page_size if group.unit == "page" else 0


def pages_per_sequence(group: Group, num_tokens: int, ahead: int | None = None) -> int:
    """Returns the most pages that a sequence of up to `num_tokens` holds in a group while it generates.

    Args:
        group: a paged group.
        num_tokens: its tokens.
        ahead: `None` if pages before a window stay until its end.
    """
    return most_pages(group, num_tokens, None if ahead is None else 1)


def bytes_per_sequence(group: Group, num_tokens: int, ahead: int | None = None) -> int:
    """Returns what a sequence of `num_tokens` holds in all the group's layers: whole pages, or one state."""
    units = pages_per_sequence(group, num_tokens, ahead) if group.unit == "page" else 1
    return units * group.bytes_per_unit


def _pages_ahead(group: Group, ahead: int) -> int:
    """Returns the pages that steps under way write in a window group, over all sequences."""
    return group.pages_for(ahead) + 1


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
    ahead: int | None = None,
) -> Budget:
    """Divides memory among the groups so that all paged groups hold the same number of tokens.

    State groups get one state per sequence and the zero state, and recurrent ones one more per checkpoint. What
    remains is pages, as many as fit. Where pages before a window are given back (`ahead`), a group with a window gets
    what its windows need instead, see `_windows_first`.

    Args:
        layout: the groups, the sampling group included.
        budget_bytes: memory for the cache; `None` takes just what `max_sequences` sequences of `max_tokens` need.
        max_sequences: sequences in flight at once.
        max_tokens: tokens of the longest sequence meant.
        checkpoints: states that outlive their sequences, for prompts that begin alike.
        ahead: tokens of steps under way, all sequences together, that a window group holds beside what its windows see;
            `None` if pages are given back at the end of a sequence alone.

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
    if ahead is not None:
        for_pages = None if budget_bytes is None else budget_bytes - state_bytes
        divided = _windows_first(paged, for_pages, max_sequences, max_tokens, ahead)
        if divided is not None:
            counts |= divided
            taken = sum(g.bytes_per_unit * counts[g.name] for g in layout.groups)
            given = taken if budget_bytes is None else budget_bytes
            return Budget(layout, counts, given, max_sequences, max_tokens, ahead)
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


def _windows_first(
    paged: Sequence[Group],
    budget_bytes: int | None,
    max_sequences: int,
    max_tokens: int,
    ahead: int,
) -> dict[str, int] | None:
    """Divides memory for pages where window groups hold no more than their windows and what steps under way write.

    All `max_sequences` sequences get their windows as long as these take no more than half the memory. Where they
    would take more, as many get them as whole sequences of `max_tokens` fit, or as half the memory is enough for. What
    is left over once everything wanted fits is divided equally, for kept prefixes.

    Returns:
        Pages of each group, by name; `None` if no group would be smaller for its window, or memory is short for one
        sequence.
    """
    most = {g.name: max_sequences * g.pages_for(max_tokens) for g in paged}
    each = {g.name: pages_per_sequence(g, max_tokens, ahead) for g in paged}
    beside = {g.name: 0 if g.window is None else _pages_ahead(g, ahead) for g in paged}
    wanted = {
        g.name: min(most[g.name], max_sequences * each[g.name] + beside[g.name]) for g in paged
    }
    if wanted == most:
        return None
    sizes = {g.name: g.bytes_per_unit for g in paged}
    if budget_bytes is None or budget_bytes >= _bytes(wanted, sizes):
        spare = 0 if budget_bytes is None else budget_bytes - _bytes(wanted, sizes)
        bundle = math.lcm(*(g.page_size for g in paged))
        more = spare // sum(bundle * bytes_per_token(g) for g in paged)
        return {g.name: wanted[g.name] + more * (bundle // g.page_size) for g in paged}
    rest = budget_bytes - _bytes(beside, sizes)
    rolling = {g.name: each[g.name] if g.window is not None else 0 for g in paged}
    for_windows, for_all = _bytes(rolling, sizes), _bytes(each, sizes)
    if rest < for_all:
        return None
    most_rows = (rest - (for_all - for_windows)) // for_windows  # One sequence is kept whole.
    rows = max(rest // for_all, min(rest // 2 // for_windows, most_rows))
    rows, full = min(max_sequences, rows), [g for g in paged if g.window is None]
    left = rest - rows * for_windows
    bundle = math.lcm(*(g.page_size for g in full))
    bundles = left // sum(bundle * bytes_per_token(g) for g in full) if full else 0
    return {
        g.name: bundles * (bundle // g.page_size)
        if g.window is None
        else rows * each[g.name] + beside[g.name]
        for g in paged
    }


def _bytes(counts: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    return sum(count * sizes[name] for name, count in counts.items())

"""Divides a memory budget into pages and states per group, exact to the byte, and explains the result."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxkv.cache.spec import CacheLayout, Group
from jaxkv.cache.windows import most_pages


@dataclass(frozen=True)
class Budget:
    """The division of a cache's memory among its groups.

    Attributes:
        layout: the groups.
        counts: group name -> number of pages or states.
        budget_bytes: bytes available for the cache.
        max_sequences: sequences in flight at once.
        max_tokens: tokens of the longest sequence to plan for.
        ahead: tokens that in-flight steps write, over all sequences. A window group has pages for these tokens beside
            the pages of its windows. `None` if pages outside a window are freed only when their sequence ends.
    """

    layout: CacheLayout
    counts: Mapping[str, int]
    budget_bytes: int
    max_sequences: int
    max_tokens: int
    ahead: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes that the cache takes, at most `budget_bytes`."""
        return sum(self.counts[group.name] * group.bytes_per_unit for group in self.layout.groups)

    @property
    def left_over(self) -> int:
        """Unused bytes: too few for one more page, or one more bundle of pages where groups differ in page size."""
        return self.budget_bytes - self.bytes

    @property
    def num_tokens(self) -> int | None:
        """Tokens that fit over all sequences; `None` if no group is paged.

        A window group that frees pages outside its window does not limit the number, unless all groups are such.
        """
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
        for_windows = pages - _pages_ahead(group, self.ahead)
        return max(whole, for_windows // pages_per_sequence(group, self.max_tokens, self.ahead))

    def explain(self) -> str:
        """Returns a printable table of bytes per token, per sequence and in total, one line per group."""
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
                    f"{group.name}: a sequence holds the last {group.window:,} tokens and those that steps in flight "
                    f"write, up to {self.ahead:,} tokens over all sequences"
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
    """Returns the bytes of one token over all layers of a group; 0 for a group of states."""
    return group.bytes_per_unit // group.page_size if group.unit == "page" else 0


def pages_per_sequence(group: Group, num_tokens: int, ahead: int | None = None) -> int:
    """Returns the most pages that a sequence holds in a group while it generates.

    Args:
        group: a paged group.
        num_tokens: tokens of the sequence at its end.
        ahead: `None` if pages outside the window are freed only when the sequence ends.
    """
    return most_pages(group, num_tokens, None if ahead is None else 1)


def bytes_per_sequence(group: Group, num_tokens: int, ahead: int | None = None) -> int:
    """Returns the bytes that a sequence of `num_tokens` holds in a group, over all layers: whole pages, or a state."""
    units = pages_per_sequence(group, num_tokens, ahead) if group.unit == "page" else 1
    return units * group.bytes_per_unit


def _pages_ahead(group: Group, ahead: int) -> int:
    """Returns the pages of a window group that `ahead` tokens of in-flight steps may touch, over all sequences."""
    return group.pages_for(ahead) + 1


def checkpoint_bytes(layout: CacheLayout) -> int:
    """Returns the bytes of one checkpoint: one state of each recurrent group, over all layers."""
    return sum(group.bytes_per_unit for group in layout.state_groups)


def checkpoints_in(layout: CacheLayout, budget_bytes: int | None) -> int:
    """Returns how many checkpoints fit in a budget; 0 without a budget or without recurrent groups.

    Raises:
        ValueError: the budget is negative, or smaller than one checkpoint.
    """
    each = checkpoint_bytes(layout)
    if not budget_bytes or not each:
        return 0
    if budget_bytes < each:
        raise ValueError(
            f"a checkpoint takes {each:,} bytes, got a budget of {budget_bytes:,}; give at least the bytes of one "
            f"checkpoint, or 0 to keep none"
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

    Each group of states gets one state per sequence and the zero state. A recurrent group also gets one state per
    checkpoint. The remaining bytes become pages. If `ahead` is given, a window group gets only the pages that its
    windows need, see `_windows_first`.

    Args:
        layout: the groups, the sampling group included.
        budget_bytes: bytes for the cache; `None` allocates what `max_sequences` sequences of `max_tokens` need.
        max_sequences: sequences in flight at once.
        max_tokens: tokens of the longest sequence to plan for.
        checkpoints: states to keep after their sequences end, for later prompts with the same prefix.
        ahead: tokens that in-flight steps write, over all sequences, for which a window group has pages beside those
            of its windows; `None` if pages outside a window are freed only when their sequence ends.

    Raises:
        ValueError: `max_sequences` or `max_tokens` is below 1, or the budget is too small for the states and one bundle
            of pages.
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
    # A bundle is the smallest set of pages that holds equally many tokens in every group.
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
    """Divides memory for pages where window groups hold only their windows and the tokens of in-flight steps.

    All `max_sequences` sequences get their windows while these take at most half the memory. Otherwise the number of
    sequences with windows is the larger of: the whole sequences of `max_tokens` that fit, and the windows that fit in
    half the memory. If everything fits, the spare memory is divided equally; it holds cached prefixes.

    Returns:
        Group name -> number of pages. `None` if no window makes a group smaller, or the memory is too small for one
        sequence.
    """
    most = {g.name: max_sequences * g.pages_for(max_tokens) for g in paged}
    each = {g.name: pages_per_sequence(g, max_tokens, ahead) for g in paged}
    in_flight = {g.name: 0 if g.window is None else _pages_ahead(g, ahead) for g in paged}
    wanted = {
        g.name: min(most[g.name], max_sequences * each[g.name] + in_flight[g.name]) for g in paged
    }
    if wanted == most:
        return None
    sizes = {g.name: g.bytes_per_unit for g in paged}
    if budget_bytes is None or budget_bytes >= _bytes(wanted, sizes):
        spare = 0 if budget_bytes is None else budget_bytes - _bytes(wanted, sizes)
        bundle = math.lcm(*(g.page_size for g in paged))
        more = spare // sum(bundle * bytes_per_token(g) for g in paged)
        return {g.name: wanted[g.name] + more * (bundle // g.page_size) for g in paged}
    rest = budget_bytes - _bytes(in_flight, sizes)
    rolling = {g.name: each[g.name] if g.window is not None else 0 for g in paged}
    for_windows, for_all = _bytes(rolling, sizes), _bytes(each, sizes)
    if rest < for_all:
        return None
    # At least one sequence keeps its pages in the groups without a window.
    most_rows = (rest - (for_all - for_windows)) // for_windows
    rows = max(rest // for_all, min(rest // 2 // for_windows, most_rows))
    rows, full = min(max_sequences, rows), [g for g in paged if g.window is None]
    left = rest - rows * for_windows
    bundle = math.lcm(*(g.page_size for g in full))
    bundles = left // sum(bundle * bytes_per_token(g) for g in full) if full else 0
    return {
        g.name: bundles * (bundle // g.page_size)
        if g.window is None
        else rows * each[g.name] + in_flight[g.name]
        for g in paged
    }


def _bytes(counts: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    return sum(count * sizes[name] for name, count in counts.items())

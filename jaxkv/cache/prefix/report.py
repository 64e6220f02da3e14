"""Reports of the prefix index: statistics, and for one prompt the hit of each group and the reason for its end."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.cache.kept_pages.lookup import Lookup, longest, next_longer
from jaxkv.cache.kept_pages.tree import PrefixTree
from jaxkv.cache.kept_states.lower_tier import LowerTier

NO_CHECKPOINT = (
    "group {!r} is recurrent and the cache has no room for checkpoints; raise checkpoint_bytes"
)
NO_LATER = "group {!r} has no checkpoint after more than {:,} of these tokens"
NOT_PAGED = "no group of this cache is paged"
LAST_TOKEN = "the last token is always computed"


@dataclass(frozen=True)
class GroupReport:
    """The cached pages of one prompt in one group.

    Attributes:
        group: group name.
        page_size: tokens per page.
        pages: full pages of the prompt.
        pages_kept: full pages cached on the device.
        pages_on_host: full pages cached on the host and not on the device.
        longest: tokens of the longest hit, if this were the only group.
        missing: table position of the first missing page of a longer hit; `None` if there is none.
        reason: why that page is missing; empty if there is none.
    """

    group: str
    page_size: int
    pages: int
    pages_kept: int
    longest: int
    missing: int | None
    reason: str
    pages_on_host: int = 0

    def __str__(self) -> str:
        kept = f"{self.group}: {self.pages_kept} of {self.pages} full pages of {self.page_size} tokens are cached"
        kept += f" and {self.pages_on_host} on the host" if self.pages_on_host else ""
        blocked = f"; {self.reason}" if self.reason else ""
        return f"{kept}, alone allows {self.longest:,} tokens{blocked}"


@dataclass(frozen=True)
class Explanation:
    """The cached part of a prompt. `str()` gives a printable report.

    Attributes:
        num_tokens: tokens of the prompt.
        num_reused: leading tokens that are not computed.
        why: the reason why the hit is not longer.
        groups: one report per paged group.
        tick: the current tick of the index, by which evictions are dated.
        recurrent: names of the recurrent groups.
        checkpoints: lengths in tokens of this prompt's checkpoints, ascending.
        window_limited: tokens by which a hit of the groups without windows alone is longer than the hit of all groups.
        num_with_host: tokens that are not computed after a swap-in from the host; `None` without a host tier.
    """

    num_tokens: int
    num_reused: int
    why: str
    groups: tuple[GroupReport, ...]
    tick: int
    recurrent: tuple[str, ...] = ()
    checkpoints: tuple[int, ...] = ()
    window_limited: int = 0
    num_with_host: int | None = None

    def __str__(self) -> str:
        computed = self.num_tokens - self.num_reused
        head = f"{self.num_reused:,} of {self.num_tokens:,} tokens are in the cache, {computed:,} are computed"
        lines = [f"{head}: {self.why}", *(f"  {group}" for group in self.groups)]
        if self.window_limited:
            lines.append(
                f"  windows: {self.window_limited:,} more tokens are cached in the groups without a window, but not "
                f"the pages that the windows after them would need"
            )
        if self.num_with_host is not None:
            lines.append(f"  with pages on the host: {self.num_with_host:,} tokens")
        if self.recurrent:
            places = ", ".join(f"{place:,}" for place in self.checkpoints) or "none"
            lines.append(
                f"  {', '.join(self.recurrent)}: checkpoints after these numbers of tokens: {places}"
            )
        return "\n".join(lines)


def reason_for(lookup: Lookup, tree: PrefixTree, position: int) -> str:
    """Returns the reason why a group lacks the page at a table position."""
    if position >= len(lookup.keys):
        return f"page {position} is not full, and only full pages are cached"
    evicted = tree.when_evicted(lookup.keys[position])
    if evicted is not None:
        return f"page {position} was evicted at tick {evicted}"
    return f"page {position} was never computed for these tokens and this salt, or dropped long ago"


def report_group(
    lookup: Lookup, tree: PrefixTree, limit: int, host: LowerTier | None = None
) -> GroupReport:
    """Returns the report of one group; `limit` is the most tokens that a hit may have."""
    alone = longest([lookup], limit)
    wanted = min(limit, next_longer([lookup], alone))
    missing = lookup.missing(wanted) if alone < limit else None
    kept = sum(node is not None for node in lookup.nodes)
    away = [key for key, node in zip(lookup.keys, lookup.nodes, strict=True) if node is None]
    on_host = 0 if host is None else sum(host.find(lookup.name, key) is not None for key in away)
    reason = "" if missing is None else reason_for(lookup, tree, missing)
    return GroupReport(
        lookup.name, lookup.rule.page_size, len(lookup.keys), kept, alone, missing, reason, on_host
    )


def window_limited(lookups: Sequence[Lookup], limit: int) -> int:
    """Returns by how many tokens a hit of up to `limit` tokens would be longer without the window groups."""
    everywhere = [lookup for lookup in lookups if lookup.rule.window is None]
    if not everywhere or len(everywhere) == len(lookups):
        return 0
    return longest(everywhere, limit) - longest(lookups, limit)


def why_no_more(
    lookups: Sequence[Lookup], trees: dict[str, PrefixTree], length: int, limit: int
) -> str:
    """Returns the reason why a hit is not longer than `length` tokens: the first group without the next page."""
    if length == limit:
        return LAST_TOKEN
    wanted = min(limit, next_longer(lookups, length))
    lacking = [
        (view, position) for view in lookups if (position := view.missing(wanted)) is not None
    ]
    view, position = lacking[0]
    return f"group {view.name!r}: {reason_for(view, trees[view.name], position)}"

"""What the prefix index says of itself: figures, and for one text what hit, what missed and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxkv.cache.kept_pages.lookup import Lookup, longest, next_longer
from jaxkv.cache.kept_pages.tree import PrefixTree
from jaxkv.cache.lower_tier import LowerTier

NO_CHECKPOINT = (
    "group {!r} is recurrent and keeps no checkpoint to begin from: the cache has no room for any"
)
NO_LATER = "group {!r} has no checkpoint after more than {:,} of these tokens"
NOT_PAGED = "no group of this cache is paged"
LAST_TOKEN = "the last token is always computed"


@dataclass
class PrefixStats:
    """Counts since the index was made.

    Attributes:
        hits: sequences that began with tokens from the cache.
        misses: sequences that began without.
        tokens_reused: tokens that sequences found.
        tokens_computed: tokens that they did not find and had to compute.
        evictions: pages forgotten to make room.
        tokens_without_states: of the tokens computed, those whose pages were there, but no checkpoint after them.
        short_of_states: sequences that this concerned.
        checkpoints: that were made.
        checkpoints_dropped: that were wanted, but there was no room or what they need was gone.
        checkpoint_evictions: given up to make room.
        deferrals: sequences that waited for a checkpoint that another one was computing.
    """

    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    evictions: int = 0
    tokens_without_states: int = 0
    short_of_states: int = 0
    checkpoints: int = 0
    checkpoints_dropped: int = 0
    checkpoint_evictions: int = 0
    deferrals: int = 0


@dataclass(frozen=True)
class GroupReport:
    """What one group keeps of a text.

    Attributes:
        group: its name.
        page_size: tokens per page.
        pages: full pages of the text.
        pages_kept: those that are kept.
        pages_on_host: those that lie on the host and not on the device.
        longest: tokens it would let a sequence skip, alone.
        missing: position of the first page that it lacks to allow more; `None` if it lacks none.
        reason: why it does not allow more; empty if it allows all but the last token.
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
        kept = f"{self.group}: keeps {self.pages_kept} of {self.pages} full pages of {self.page_size} tokens"
        kept += f" and {self.pages_on_host} on the host" if self.pages_on_host else ""
        blocked = f"; {self.reason}" if self.reason else ""
        return f"{kept}, alone allows {self.longest:,} tokens{blocked}"


@dataclass(frozen=True)
class Explanation:
    """What of a prompt is in the cache. `str` gives the same for people.

    Attributes:
        num_tokens: tokens of the prompt.
        num_reused: those that need not be computed.
        why: what ended the hit.
        groups: each paged group's part.
        tick: uses of the index so far, the clock of its evictions.
        recurrent: names of the recurrent groups.
        checkpoints: numbers of tokens after which there are states of this text, ascending.
        window_limited: tokens that groups without windows keep beyond what all groups allow: a page is gone that a
            window would see.
        num_with_host: tokens that need not be computed once the host has given back what it has; `None` without one.
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
                f"  windows: {self.window_limited:,} tokens more are kept where everything is seen, but not what the "
                f"windows after them would see"
            )
        if self.num_with_host is not None:
            lines.append(f"  with what lies on the host: {self.num_with_host:,} tokens")
        if self.recurrent:
            places = ", ".join(f"{place:,}" for place in self.checkpoints) or "none"
            lines.append(
                f"  {', '.join(self.recurrent)}: tokens after which states are kept: {places}"
            )
        return "\n".join(lines)


def reason_for(lookup: Lookup, tree: PrefixTree, position: int) -> str:
    """Says why a group does not have the page at a position of a text's table."""
    if position >= len(lookup.keys):
        return f"page {position} is not full, and only full pages are kept"
    evicted = tree.when_evicted(lookup.keys[position])
    if evicted is not None:
        return f"page {position} was evicted at tick {evicted}"
    return (
        f"page {position} was never computed after these tokens under this salt, or long forgotten"
    )


def report_group(
    lookup: Lookup, tree: PrefixTree, limit: int, host: LowerTier | None = None
) -> GroupReport:
    """Reports on one group; `limit` is the prompt's length less the token that is always computed."""
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
    """Returns how much longer a hit of up to `limit` tokens could be if windows saw nothing."""
    everywhere = [lookup for lookup in lookups if lookup.rule.window is None]
    if not everywhere or len(everywhere) == len(lookups):
        return 0
    return longest(everywhere, limit) - longest(lookups, limit)


def why_no_more(
    lookups: Sequence[Lookup], trees: dict[str, PrefixTree], length: int, limit: int
) -> str:
    """Says what ended a hit of `length` tokens: the first group that does not allow the next longer one."""
    if length == limit:
        return LAST_TOKEN
    wanted = min(limit, next_longer(lookups, length))
    lacking = [
        (view, position) for view in lookups if (position := view.missing(wanted)) is not None
    ]
    view, position = lacking[0]
    return f"group {view.name!r}: {reason_for(view, trees[view.name], position)}"

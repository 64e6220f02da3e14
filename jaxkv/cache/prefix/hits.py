"""The lookup of a token sequence: its longest cached prefix over all groups, and the explanation of the result."""

from collections.abc import Mapping, Sequence

from jaxkv.cache.kept_pages.keeper import PageKeeper
from jaxkv.cache.kept_pages.keys import PageKeys
from jaxkv.cache.kept_pages.lookup import Lookup, longest
from jaxkv.cache.kept_states.keeper import StateKeeper
from jaxkv.cache.kept_states.lower_tier import SwapIns
from jaxkv.cache.page_allocator import Match
from jaxkv.cache.prefix.report import (
    NO_CHECKPOINT,
    NO_LATER,
    NOT_PAGED,
    Explanation,
    report_group,
    why_no_more,
    window_limited,
)
from jaxkv.cache.spec import CacheLayout


class Hits:
    """Finds the longest prefix that every group has cached, in pages and in checkpoints. It changes nothing.

    Args:
        layout: the groups.
        pages: the cached pages.
        states: the checkpoints.

    Attributes:
        never: the reason why no lookup can succeed; empty if one may.
    """

    def __init__(self, layout: CacheLayout, pages: PageKeeper, states: StateKeeper) -> None:
        self._pages = pages
        self._states = states
        # If the cache keeps the last hidden state, even the last token need not be computed.
        self._spare = 0 if layout.keeps_outputs else 1
        self.never = "" if pages.rules or layout.state_groups else NOT_PAGED
        for group in layout.state_groups if not states.capacity else ():
            self.never = NO_CHECKPOINT.format(group.name)

    def limit(self, tokens: Sequence[int], most: int | None) -> int:
        """Returns the most tokens of a hit: all but the last, or all if outputs are kept, and at most `most`."""
        limit = max(0, len(tokens) - self._spare)
        return limit if most is None else max(0, min(most, limit))

    def match(
        self,
        lookups: Sequence[Lookup],
        tokens: Sequence[int],
        keys: PageKeys,
        most: int | None = None,
    ) -> Match:
        """Returns the longest match.

        Args:
            lookups: each group's cached pages of `tokens`.
            tokens: all tokens.
            keys: their page keys.
            most: upper limit of its tokens; `None` for no such limit.
        """
        limit = self.limit(tokens, most)
        length = 0 if self.never or not lookups else longest(lookups, limit)
        unaided, began = length, None
        if self._states.groups:
            began = self._states.longest(lookups, tokens, keys, limit)
            length = 0 if began is None else began.length
        tails = {} if began is None else began.tails
        covered = {
            lookup.name: full
            for lookup in lookups
            if self._states.groups and (full := lookup.full(len(tokens))) > length
        }
        pages = {
            lookup.name: _pages(lookup, covered[lookup.name], {})
            if lookup.name in covered
            else _pages(lookup, length, tails)
            for lookup in lookups
        }
        return Match(
            num_tokens=length,
            pages=pages,
            unneeded={lookup.name: lookup.rule.needs(length).start for lookup in lookups},
            why=self.never or self._why(lookups, length, limit, unaided),
            states={} if began is None else began.states,
            origin=None if began is None else began.key.digest,
            covered=covered,
        )

    def explain(
        self, tokens: Sequence[int], keys: PageKeys, tick: int, swap_ins: SwapIns | None
    ) -> Explanation:
        """Returns the cached part of a prompt, group by group, and the reason why it is not longer.

        Args:
            tokens: the prompt.
            keys: its page keys.
            tick: the current tick.
            swap_ins: the swap-ins from the host tier; `None` without one.
        """
        lookups = self._pages.look_up(tokens, keys)
        match, limit = self.match(lookups, tokens, keys), len(tokens) - self._spare
        host = None if swap_ins is None else swap_ins.tier
        with_host = None
        if swap_ins is not None:
            found, _ = swap_ins.find_prefix(tokens, keys, self.limit(tokens, None))
            with_host = max(match.num_tokens, found)
        along = self._states.kept.along(keys, tokens) if self._states.groups else ()
        return Explanation(
            num_tokens=len(tokens),
            num_reused=match.num_tokens,
            why=match.why,
            groups=tuple(
                report_group(view, self._pages.trees[view.name], limit, host) for view in lookups
            ),
            tick=tick,
            window_limited=window_limited(lookups, limit),
            num_with_host=with_host,
            recurrent=self._states.groups,
            checkpoints=tuple(sorted(one.length for one in along)),
        )

    def _why(self, lookups: Sequence[Lookup], length: int, limit: int, paged: int) -> str:
        """Returns the reason why a hit of `length` tokens is not longer; the pages alone allow `paged` tokens."""
        if length < limit and (paged > length or not lookups):
            upto = f", though the pages are cached up to {paged:,}" if lookups else ""
            return f"{NO_LATER.format(', '.join(self._states.groups), length)}{upto}"
        return why_no_more(lookups, self._pages.trees, length, limit)


def _pages(lookup: Lookup, length: int, tails: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the pages of an accepted length; the last is the checkpoint's own where it ends inside a page."""
    if lookup.name not in tails:
        return tuple(node.page for node in lookup.needed_nodes(length))
    full = length // lookup.rule.page_size
    found = [lookup.nodes[index] for index in lookup.rule.needs(length) if index < full]
    return (*(node.page for node in found if node is not None), tails[lookup.name])

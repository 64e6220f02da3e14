"""How much of a text the cache has already, and whether that is still so. Finds nothing; the prefix index does."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxkv.cache.pool import PagePool
from jaxkv.cache.spec import CacheLayout


@dataclass(frozen=True)
class Match:
    """How much of a text is in the cache already. It pins nothing, so it is good until the next verb.

    Attributes:
        num_tokens: tokens that need not be computed, from the first one on.
        pages: paged group's name -> the pages that hold them, from table position `unneeded` on.
        unneeded: paged group's name -> leading table positions that no token to come can see.
        why: what ended the match, for people.
        states: recurrent group's name -> the state after these very tokens, if there are any.
        origin: name of the checkpoint that has the states.
        covered: paged group's name -> tokens that its pages hold, where they are more than may be skipped for want of
            states: those beyond are computed again and not written.
    """

    num_tokens: int
    pages: Mapping[str, tuple[int, ...]]
    unneeded: Mapping[str, int]
    why: str
    states: Mapping[str, int] = field(default_factory=dict)
    origin: bytes | None = None
    covered: Mapping[str, int] = field(default_factory=dict)


def check_match(match: Match, layout: CacheLayout, pools: Mapping[str, PagePool]) -> None:
    """Raises `ValueError` if a sequence could not begin with a match: see `PageAllocator.adopt`."""
    lacking = [
        group.name
        for group in layout.state_groups
        if match.num_tokens and match.states.get(group.name) not in pools[group.name].kept
    ]
    if lacking:
        raise ValueError(
            f"{match.num_tokens} tokens would be skipped, but not by {lacking}, of which no state is kept"
        )
    for group in layout.paged_groups:
        pages = set(match.pages[group.name])
        loose = pages - pools[group.name].kept
        length = match.unneeded[group.name] + len(pages)
        covered = max(match.num_tokens, match.covered.get(group.name, 0))
        if loose or length != group.pages_for(covered):
            raise ValueError(
                f"a match of {covered} tokens fills {length} places in {group.name!r} "
                f"with the pages {match.pages[group.name]}, of which {sorted(loose)} are not kept; look it up again"
            )

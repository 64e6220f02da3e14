"""`Match`, the result of a prefix lookup, and its check against the pools."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxkv.cache.pool import PagePool
from jaxkv.cache.spec import CacheLayout


@dataclass(frozen=True)
class Match:
    """The cached prefix of a token sequence. It holds no references, so it is valid until the next allocator call.

    Attributes:
        num_tokens: leading tokens that are not computed again.
        pages: paged group name -> page ids of these tokens, from table position `unneeded` on.
        unneeded: paged group name -> leading table positions that no later token sees.
        why: the reason why the match is not longer, for people.
        states: recurrent group name -> id of the state after `num_tokens` tokens; empty without recurrent groups.
        origin: digest of the checkpoint that holds the states.
        covered: paged group name -> tokens whose pages are cached, where these are more than `num_tokens` because the
            recurrent groups have no checkpoint there. The tokens beyond `num_tokens` are computed again, but their
            pages are not written.
    """

    num_tokens: int
    pages: Mapping[str, tuple[int, ...]]
    unneeded: Mapping[str, int]
    why: str
    states: Mapping[str, int] = field(default_factory=dict)
    origin: bytes | None = None
    covered: Mapping[str, int] = field(default_factory=dict)


def check_match(match: Match, layout: CacheLayout, pools: Mapping[str, PagePool]) -> None:
    """Raises `ValueError` if a sequence cannot begin with a match; see `PageAllocator.adopt`."""
    lacking = [
        group.name
        for group in layout.state_groups
        if match.num_tokens and match.states.get(group.name) not in pools[group.name].kept
    ]
    if lacking:
        raise ValueError(
            f"the match skips {match.num_tokens} tokens, but the groups {lacking} have no cached state after them; "
            f"look it up again"
        )
    for group in layout.paged_groups:
        pages = set(match.pages[group.name])
        loose = pages - pools[group.name].kept
        length = match.unneeded[group.name] + len(pages)
        covered = max(match.num_tokens, match.covered.get(group.name, 0))
        if loose or length != group.pages_for(covered):
            raise ValueError(
                f"a match of {covered} tokens has {length} pages in {group.name!r}, wanted "
                f"{group.pages_for(covered)}; of its pages {match.pages[group.name]}, {sorted(loose)} are not cached; "
                f"look it up again"
            )

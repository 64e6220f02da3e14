"""Defects of the length and contents of hits that other projects shipped."""

from jaxkv.cache.kept_pages.lookup import HitRule, Lookup
from jaxkv.cache.prefix import hits as prefix_hits
from tests.defects import Defects, wrap

DEFECTS = Defects()


@DEFECTS(AssertionError, "a page holds another text")
def one_group_gets_the_pages_of_another(patch):
    """Page ids of the first group in every table."""

    def make(match):
        def mixed(hits, lookups, *text):
            found = match(hits, lookups, *text)
            first = next(iter(found.pages.values()))
            return prefix_hits.Match(
                found.num_tokens, dict.fromkeys(found.pages, first), found.unneeded, ""
            )

        return mixed

    wrap(patch, prefix_hits.Hits, "match", make)


def wrong_hits(patch, make):
    """Has the index take another length than the longest, which it then cannot explain."""
    wrap(patch, prefix_hits, "longest", make)
    patch.setattr(prefix_hits, "why_no_more", lambda *_: "")


@DEFECTS(AssertionError, "a hit of")
def a_hit_covers_the_last_token_too(patch):
    """vLLM #3239: the step is empty."""
    wrong_hits(patch, lambda best: lambda lookups, limit: best(lookups, limit + 1))


@DEFECTS(AssertionError, "a hit of")
def a_hit_is_one_token_short(patch):
    wrong_hits(patch, lambda best: lambda *rest: max(0, best(*rest) - 1))


@DEFECTS(ValueError, "a match of .* not cached; look it up again")
def a_hit_is_one_token_long(patch):
    wrong_hits(
        patch,
        lambda best: lambda lookups, limit: min(limit, best(lookups, limit) + 1),
    )


@DEFECTS(AssertionError, "a hit of")
def a_hit_is_rounded_down_to_pages(patch):
    """Recomputes a whole page where one token would do."""
    wrong_hits(patch, lambda best: lambda lookups, limit: best(lookups, limit) // 2 * 2)


@DEFECTS(AssertionError, "a hit of")
def one_group_decides_for_all(patch):
    """The hit of the first group is taken for the hit of all."""
    wrong_hits(patch, lambda best: lambda lookups, limit: best(lookups[:1], limit))


@DEFECTS(AssertionError, "have no page|a hit of")
def a_window_is_one_token_narrower(patch):

    def needs(rule, length):
        first = 0 if rule.window is None else max(0, length - max(1, rule.window - 2))
        return range(first // rule.page_size, -(-length // rule.page_size))

    patch.setattr(HitRule, "needs", needs)


@DEFECTS(AssertionError, "a hit of")
def a_window_needs_every_page(patch):
    patch.setattr(HitRule, "needs", lambda rule, length: range(-(-length // rule.page_size)))


@DEFECTS(AssertionError, "a hit of")
def a_page_that_is_missing_in_the_middle_is_not_noticed(patch):
    """The last page alone decides whether a hit is complete."""

    def accepts(lookup, length):
        needed = lookup.rule.needs(length)
        return not needed or lookup.nodes[needed[-1]] is not None

    patch.setattr(Lookup, "accepts", accepts)

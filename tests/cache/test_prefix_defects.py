"""Defects that others shipped, put into pool, accounts and index one at a time: each must be found (reliability 2, A4).

A defect is found when a random engine or one of a few scenes trips over it: the books' own checks, or the comparison
with what the played device holds.
"""

import random

import jaxtyping
import pytest

from jaxkv.cache import accounts, holdings, prefix_hits, prefix_keys, prefix_tree
from jaxkv.cache.accounts import Accounts
from jaxkv.cache.pool import PagePool
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.cache.prefix_keys import PageKeys
from jaxkv.cache.prefix_match import HitRule, Lookup
from jaxkv.cache.prefix_tree import PrefixTree
from tests.cache import test_prefix as scenes
from tests.cache.prefix_world import FULL, MIXED, ODD, WINDOW, World, run_program

WORLDS = (
    (FULL, {"group0": 9}),
    (MIXED, {"group0": 9, "group1": 14, "sampling": 5}),
    (WINDOW, {"group0": 9}),
    (ODD, {"group0": 6, "group1": 11, "group2": 8}),
)
SCENES = (
    scenes.test_only_leaves_go_the_longest_unused_first,
    scenes.test_a_use_saves_a_page_from_eviction,
    scenes.test_a_sequence_that_began_before_a_clear_publishes_nothing,
    scenes.test_different_texts_have_different_keys,
    scenes.test_counts_are_exact_on_a_scripted_trace,
    scenes.test_recurrent_groups_skip_nothing_without_a_checkpoint,
    scenes.test_a_sequence_alone_is_never_kept_waiting_by_its_own_hit,
    scenes.test_a_page_that_only_the_index_holds_is_had_even_if_pages_in_use_follow_it,
    scenes.test_a_window_needs_only_what_the_next_token_sees,
    scenes.test_pages_before_every_window_go_first,
    scenes.test_a_page_computed_again_counts_as_used,
)


def finds_nothing(seeds=5, num_operations=40):
    """Whether a random engine in each small world and every scene get through. Errors of the defect's own pass on."""
    try:
        for scene in SCENES:
            scene()
        for seed in range(seeds):
            for layout, counts in WORLDS:
                run_program(World(layout, counts), random.Random(seed), num_operations)
    except (AssertionError, ValueError, RuntimeError):
        return False
    return True


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Checking types on each call takes ten times as long as the calls, and there are no arrays here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


DEFECTS = {}


def defect(function):
    DEFECTS[function.__name__] = function
    return function


def wrap(patch, owner, name, make):
    """Replaces a function by what `make` builds around it."""
    patch.setattr(owner, name, make(getattr(owner, name)))


# The pool.


@defect
def release_frees_what_others_hold(patch):
    """Double free: vLLM #1556."""

    def release(pool, pages):
        for page in pages:
            pool._references[page] -= 1
            pool._num_idle += page in pool._kept and pool._references[page] == 1
        pool._free.extend(pages)
        return list(pages)

    patch.setattr(PagePool, "release", release)


@defect
def release_takes_a_page_twice(patch):
    """vLLM #42571: the same block twice in one call."""

    def make(release):
        return lambda pool, pages: release(pool, pages) + (pool._free.extend(pages[:1]) or [])

    wrap(patch, PagePool, "release", make)


@defect
def share_counts_nobody(patch):
    """Counter drift: SGLang #35270."""
    patch.setattr(PagePool, "share", lambda pool, pages: None)


@defect
def share_forgets_the_last_page(patch):
    """Counter drift."""
    wrap(
        patch, PagePool, "share", lambda share: lambda pool, pages: share(pool, pages[:-1] or pages)
    )


@defect
def idle_pages_are_counted_twice(patch):
    """Counter drift: SGLang #35270 counted evictable pages twice."""

    def make(share):
        def wrong(pool, pages):
            share(pool, pages)
            pool._num_idle += sum(
                page in pool._kept and pool._references[page] == 2 for page in pages
            )

        return wrong

    wrap(patch, PagePool, "share", make)


@defect
def forgetting_keeps_the_reference(patch):
    """Leak of every evicted page."""

    def forget(pool, page):
        pool._num_idle -= pool._references[page] == 1
        pool._kept.remove(page)

    patch.setattr(PagePool, "forget", forget)


@defect
def keeping_takes_no_reference(patch):
    """The index refers to pages that are free."""
    patch.setattr(PagePool, "keep", lambda pool, page: pool._kept.add(page))


# The accounts.


@defect
def an_end_leaks_the_last_page(patch):
    """Leak on abort: vLLM #14326, SGLang #20182."""

    def make(release):
        def leak(books, seq):
            for pages in books._held[seq].pages.values():
                del pages[-1:]
            release(books, seq)

        return leak

    wrap(patch, Accounts, "release", make)


@defect
def an_end_gives_back_one_group_only(patch):
    """Leak on abort, in a cache of several groups."""

    def release(books, seq):
        held = books._held.pop(seq)
        name = next(iter(books._pools))
        books._pools[name].release(held.ids(name))

    patch.setattr(Accounts, "release", release)


@defect
def a_hit_is_not_pinned(patch):
    """vLLM #37164: a cached block is stolen between look-up and use."""

    def make(adopt):
        def unpinned(books, seq, match):
            adopt(books, seq, match)
            for name, pages in match.pages.items():
                books._pools[name].release(pages)

        return unpinned

    wrap(patch, Accounts, "adopt", make)


@defect
def shared_pages_are_written_without_a_copy(patch):
    """Cross-request leakage: vLLM #39146."""
    for module in (holdings, accounts):
        patch.setattr(module, "shared_indices", lambda *_: [])


@defect
def the_copy_is_never_asked_for(patch):
    """Cross-request leakage: the page is replaced, its contents are not."""
    wrap(patch, accounts, "place_pages", lambda place: lambda *rest: place(*rest) and [])


@defect
def a_failed_reserve_keeps_what_it_took(patch):
    """T-25: Megatron #6091."""

    def make(reserve):
        def partial(books, seq, num_tokens):
            held = books._held[seq]
            for group in books._layout.paged_groups:
                pool = books._pools[group.name]
                missing = group.pages_for(num_tokens) - len(held.pages[group.name])
                held.pages[group.name] += pool.take(max(0, min(missing, pool.num_free)))
            return reserve(books, seq, num_tokens)

        return partial

    wrap(patch, Accounts, "reserve", make)


@defect
def a_reset_keeps_what_the_lost_cache_held(patch):
    """Fault row 33: stale pages after new weights."""
    wrap(
        patch,
        Accounts,
        "reset",
        lambda reset: lambda books, keep_prefix: reset(books, keep_prefix=True),
    )


@defect
def a_fork_shares_without_counting(patch):
    """Refcount drift: n samples of one prompt (vLLM #14326)."""

    def fork(books, parent, child):
        books.open(child)
        source, held = books._held[parent], books._held[child]
        held.computed = held.reserved = source.computed
        held.pages = {name: list(pages) for name, pages in source.pages.items()}
        held.unneeded = dict(source.unneeded)

    patch.setattr(Accounts, "fork", fork)


@defect
def places_before_the_window_count_as_pages(patch):
    """The filler id is released like a page that was held."""
    patch.setattr(
        holdings.Held,
        "ids",
        lambda held, name: (
            list(dict.fromkeys(held.pages[name]))
            if name in held.pages
            else held.states[name].owned()
        ),
    )


# The index.


@defect
def any_page_may_be_evicted(patch):
    """T-27: Megatron #5822 evicted parents before children."""
    wrap(
        patch,
        PrefixTree,
        "__init__",
        lambda init: lambda tree, *, leaf_only: init(tree, leaf_only=False),
    )


@defect
def only_leaves_go_even_before_a_window(patch):
    """vLLM #48435: the ends of windows go first and no hit is left."""
    wrap(
        patch,
        PrefixTree,
        "__init__",
        lambda init: lambda tree, *, leaf_only: init(tree, leaf_only=True),
    )


@defect
def pages_in_use_are_evicted(patch):
    """T-26: pinned pages count as room."""
    wrap(
        patch,
        PrefixTree,
        "victims",
        lambda victims: lambda tree, count, worth, tick: victims(tree, count, lambda node: 1, tick),
    )


@defect
def one_page_too_many_is_evicted(patch):
    wrap(
        patch,
        PrefixTree,
        "victims",
        lambda victims: lambda tree, count, worth, tick: victims(tree, count + 1, worth, tick),
    )


@defect
def one_page_too_few_is_evicted(patch):
    wrap(
        patch,
        PrefixTree,
        "victims",
        lambda victims: lambda tree, count, worth, tick: victims(tree, count - 1, worth, tick),
    )


@defect
def a_failed_eviction_evicts(patch):
    """T-25: partially consumed on failure."""

    def make(reclaim):
        def eager(index, missing, rewritten):
            for name, count in missing.items():
                pool = index._accounts.pool(name)
                if 0 < pool.num_idle < count:
                    reclaim(index, {name: pool.num_idle}, {})
            return reclaim(index, missing, rewritten)

        return eager

    wrap(patch, PrefixIndex, "reclaim", make)


@defect
def pages_behind_pages_in_use_are_out_of_reach(patch):
    """A sequence alone waits for ever for pages that nobody holds."""
    patch.setattr(PrefixTree, "_with_followers", lambda tree, count, worth: [])


@defect
def a_hit_keeps_its_own_sequence_waiting(patch):
    """A full hit in a full pool: no room for the copy, for ever."""
    patch.setattr(PrefixIndex, "_sole", lambda index, name, pages: set())


@defect
def the_most_used_goes_first(patch):
    wrap(
        patch, PrefixTree, "touch", lambda touch: lambda tree, node, tick: touch(tree, node, -tick)
    )


@defect
def a_use_does_not_count(patch):
    """First in, first out."""
    patch.setattr(PrefixTree, "touch", lambda tree, node, tick: None)


@defect
def pages_are_kept_before_they_are_computed(patch):
    """vLLM #38715, #37152: hittable at dispatch."""

    def make(adopt):
        def early(index, seq, tokens, keys):
            match = adopt(index, seq, tokens, keys)
            index._accounts.reserve(seq, len(tokens))
            index._accounts._held[seq].computed = len(tokens)
            index.publish(seq, tokens, keys, len(tokens))
            index._accounts._held[seq].computed = match.num_tokens
            return match

        return early

    wrap(patch, PrefixIndex, "adopt", make)


@defect
def pages_are_kept_before_their_step_is_collected(patch):
    """vLLM #45357: what was dispatched counts as computed."""

    def make(publish):
        def early(index, seq, tokens, keys, num_tokens):
            computed = index._accounts.num_tokens(seq)
            return publish(index, seq, tokens, keys, min(computed, len(tokens)))

        return early

    wrap(patch, PrefixIndex, "publish", make)


@defect
def a_page_that_is_not_full_is_kept(patch):
    def pages(keys, tokens, page_size, num_tokens):
        padded = [*tokens[:num_tokens], *[0] * (-num_tokens % page_size)]
        return PageKeys(keys._root, keys._salt)._pages(padded, page_size, len(padded))

    patch.setattr(PageKeys, "_pages", PageKeys.pages, raising=False)
    patch.setattr(PageKeys, "pages", pages)


@defect
def keys_are_cut_short(patch):
    """T-23: collisions of short hashes (vLLM #12621, Megatron #4158)."""
    for module in (prefix_keys,):
        wrap(patch, module, "hash_parts", lambda whole: lambda *parts: whole(*parts)[:1])


@defect
def keys_hash_the_sum_of_their_tokens(patch):
    """T-23: Megatron #4158, +31 and -1."""
    patch.setattr(prefix_keys, "encode_tokens", lambda tokens: bytes([sum(tokens) % 256]))


@defect
def keys_do_not_chain(patch):
    """S5-36: a page is found whatever came before it."""
    for module in (prefix_keys, prefix_tree):
        wrap(patch, module, "page_key", lambda make: lambda parent, tokens: make(b"", tokens))


@defect
def the_salt_is_ignored(patch):
    """reliability S5, vLLM #51899."""
    wrap(
        patch,
        PageKeys,
        "__init__",
        lambda init: lambda keys, root, salt: init(keys, root, None),
    )


@defect
def keys_ignore_the_page_size(patch):
    """T-23: one chain of keys for groups of different pages."""
    wrap(
        patch,
        PageKeys,
        "pages",
        lambda pages: lambda keys, tokens, size, n: pages(keys, tokens, 2, n),
    )


@defect
def the_tokens_are_not_compared(patch):
    """T-23: a hit on the digest alone, of one byte."""

    def find(tree, key):
        return tree._nodes.get(key.digest)

    keys_are_cut_short(patch)
    patch.setattr(PrefixTree, "find", find)


@defect
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


@defect
def a_hit_covers_the_last_token_too(patch):
    """S1-18: vLLM #3239, an empty step."""
    wrong_hits(patch, lambda best: lambda lookups, limit: best(lookups, limit + 1))


@defect
def a_hit_is_one_token_short(patch):
    wrong_hits(patch, lambda best: lambda *rest: max(0, best(*rest) - 1))


@defect
def a_hit_is_one_token_long(patch):
    wrong_hits(
        patch,
        lambda best: lambda lookups, limit: min(limit, best(lookups, limit) + 1),
    )


@defect
def a_hit_is_rounded_down_to_pages(patch):
    """Recomputes a whole page where one token would do."""
    wrong_hits(patch, lambda best: lambda lookups, limit: best(lookups, limit) // 2 * 2)


@defect
def one_group_decides_for_all(patch):
    """T-24's cause: the first group's hit is taken for everyone's."""
    wrong_hits(patch, lambda best: lambda lookups, limit: best(lookups[:1], limit))


@defect
def a_window_is_one_token_narrower(patch):
    """S2-11."""

    def needs(rule, length):
        first = 0 if rule.window is None else max(0, length - max(1, rule.window - 2))
        return range(first // rule.page_size, -(-length // rule.page_size))

    patch.setattr(HitRule, "needs", needs)


@defect
def a_window_needs_every_page(patch):
    patch.setattr(HitRule, "needs", lambda rule, length: range(-(-length // rule.page_size)))


@defect
def a_page_that_is_missing_in_the_middle_is_not_noticed(patch):
    """A hit is judged by its last page."""

    def accepts(lookup, length):
        needed = lookup.rule.needs(length)
        return not needed or lookup.nodes[needed[-1]] is not None

    patch.setattr(Lookup, "accepts", accepts)


@defect
def the_last_page_of_a_name_replaces_the_first(patch):
    """S5-35: registration is not idempotent."""

    def make(add):
        def replace(tree, key, page, index, tick):
            node = tree._nodes.get(key.digest)
            if node is not None:
                node.page = page
            return add(tree, key, page, index, tick)

        return replace

    wrap(patch, PrefixTree, "add", make)


@defect
def every_page_of_a_sequence_is_kept_again(patch):
    """S5-35: a duplicate gets an entry of its own."""
    patch.setattr(PrefixTree, "find", lambda tree, key: None)


@defect
def removing_a_page_removes_its_equals(patch):
    """T-22: the entry of another page with the same tokens goes too."""

    def make(remove):
        def greedy(tree, node, tick):
            remove(tree, node, tick)
            for other in [
                one for one in tree if one.key.tokens == node.key.tokens and not one.children
            ]:
                remove(tree, other, tick)

        return greedy

    wrap(patch, PrefixTree, "remove", make)


@defect
def removing_a_page_leaves_its_entry(patch):
    """The entry of an evicted page is still hit."""
    patch.setattr(PrefixTree, "remove", lambda tree, node, tick: None)


@defect
def a_clear_leaves_the_entries(patch):
    patch.setattr(PrefixTree, "clear", lambda tree: [node.page for node in tree])


@defect
def a_clear_leaves_the_references(patch):
    """Leak of the whole cache at a reset."""

    def clear(index):
        for tree in index._trees.values():
            tree.clear()
        index._epoch += 1

    patch.setattr(PrefixIndex, "clear", clear)


@defect
def a_clear_begins_no_epoch(patch):
    """Fault row 33: stale pages are published after the weights changed."""

    def make(clear):
        def same(index):
            clear(index)
            index._epoch -= 1

        return same

    wrap(patch, PrefixIndex, "clear", make)


@defect
def a_failed_sequence_leaves_its_pages(patch):
    """Fault row 8: NaN is served to others (vLLM #50283)."""
    patch.setattr(PrefixIndex, "withdraw", lambda index, seq: 0)


@defect
def what_follows_a_failed_page_stays(patch):
    """Orphans of a withdrawn page."""
    patch.setattr(prefix_tree, "_branches", lambda roots, followers: list(roots))


@defect
def recurrent_groups_are_skipped(patch):
    """T-24: vLLM #47491."""

    def make(init):
        def bold(index, layout, books, **options):
            init(index, layout, books, **options)
            index._hits.never = ""

        return bold

    wrap(patch, PrefixIndex, "__init__", make)


def test_without_a_defect_nothing_is_found():
    assert finds_nothing()


@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_is_found(name, monkeypatch):
    DEFECTS[name](monkeypatch)
    assert not finds_nothing(seeds=60), f"nobody noticed: {name}"

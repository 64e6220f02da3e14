"""Defects of publishing, keys and eviction in the prefix index that other projects shipped."""

from jaxkv.cache.kept_pages import keys as prefix_keys
from jaxkv.cache.kept_pages import tree as prefix_tree
from jaxkv.cache.kept_pages.keys import PageKeys
from jaxkv.cache.kept_pages.tree import PrefixTree
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.errors import CorruptBooks, OutOfPages
from tests.cache.kept_pages import test_keeper, test_keys, test_lookup
from tests.cache.prefix import test_index
from tests.defects import Defects, wrap

DEFECTS = Defects()


@DEFECTS(AssertionError, "a page is kept without the one before it")
def any_page_may_be_evicted(patch):
    """Megatron #5822 evicted parents before children."""
    wrap(
        patch,
        PrefixTree,
        "__init__",
        lambda init: lambda tree, *, leaf_only: init(tree, leaf_only=False),
    )


@DEFECTS(scene=test_lookup.test_pages_before_every_window_go_first)
def only_leaves_go_even_before_a_window(patch):
    """vLLM #48435: the ends of windows go first and no hit is left."""
    wrap(
        patch,
        PrefixTree,
        "__init__",
        lambda init: lambda tree, *, leaf_only: init(tree, leaf_only=True),
    )


@DEFECTS(AssertionError, "a failed reserve changed something")
def pages_in_use_are_evicted(patch):
    """Pinned pages count as room."""
    wrap(
        patch,
        PrefixTree,
        "victims",
        lambda victims: lambda tree, count, worth, tick: victims(tree, count, lambda node: 1, tick),
    )


@DEFECTS(AssertionError, "more pages were evicted|not as many pages were evicted")
def one_page_too_many_is_evicted(patch):
    wrap(
        patch,
        PrefixTree,
        "victims",
        lambda victims: lambda tree, count, worth, tick: victims(tree, count + 1, worth, tick),
    )


@DEFECTS(AssertionError, "there was room|not as many pages were evicted")
def one_page_too_few_is_evicted(patch):
    wrap(
        patch,
        PrefixTree,
        "victims",
        lambda victims: lambda tree, count, worth, tick: victims(tree, count - 1, worth, tick),
    )


@DEFECTS(AssertionError, "a failed eviction evicted|a failed reserve changed")
def a_failed_eviction_evicts(patch):
    """An eviction that fails is partially consumed."""

    def make(reclaim):
        def eager(index, missing, rewritten):
            for name, count in missing.items():
                pool = index._allocator.pool(name)
                if 0 < pool.num_idle < count:
                    reclaim(index, {name: pool.num_idle}, {})
            return reclaim(index, missing, rewritten)

        return eager

    wrap(patch, PrefixIndex, "reclaim", make)


@DEFECTS(
    OutOfPages,
    scene=test_keeper.test_a_page_that_only_the_index_holds_is_had_even_if_pages_in_use_follow_it,
)
def pages_behind_pages_in_use_are_out_of_reach(patch):
    """A single sequence waits forever for pages that no sequence holds."""
    patch.setattr(PrefixTree, "_with_followers", lambda tree, count, worth: [])


@DEFECTS(
    OutOfPages,
    scene=test_keeper.test_a_sequence_alone_is_never_kept_waiting_by_its_own_hit,
)
def a_hit_keeps_its_own_sequence_waiting(patch):
    """A full hit in a full pool: no room for the copy, for ever."""
    patch.setattr(PrefixIndex, "_sole", lambda index, name, pages: set())


@DEFECTS(scene=test_keeper.test_only_leaves_go_the_longest_unused_first)
def the_most_used_goes_first(patch):
    wrap(
        patch,
        PrefixTree,
        "touch",
        lambda touch: lambda tree, node, tick, **tail: touch(tree, node, -tick, **tail),
    )


@DEFECTS(scene=test_keeper.test_a_use_saves_a_page_from_eviction)
def a_use_does_not_count(patch):
    """First in, first out."""
    patch.setattr(PrefixTree, "touch", lambda tree, node, tick, **tail: None)


@DEFECTS(AssertionError, "a hit took or gave back pages")
def pages_are_kept_before_they_are_computed(patch):
    """vLLM #38715, #37152: hittable at dispatch."""

    def make(adopt):
        def early(index, seq, tokens, keys):
            match = adopt(index, seq, tokens, keys)
            index._allocator.reserve(seq, len(tokens))
            index._allocator._held[seq].computed = len(tokens)
            index.publish(seq, tokens, keys, len(tokens))
            index._allocator._held[seq].computed = match.num_tokens
            return match

        return early

    wrap(patch, PrefixIndex, "adopt", make)


@DEFECTS(AssertionError, "kept before its step was collected")
def pages_are_kept_before_their_step_is_collected(patch):
    """vLLM #45357: what was dispatched counts as computed."""

    def make(publish):
        def early(index, seq, tokens, keys, num_tokens):
            computed = index._allocator.num_tokens(seq)
            return publish(index, seq, tokens, keys, min(computed, len(tokens)))

        return early

    wrap(patch, PrefixIndex, "publish", make)


@DEFECTS(AssertionError, "is kept and was not computed")
def a_page_that_is_not_full_is_kept(patch):
    def pages(keys, tokens, page_size, num_tokens):
        padded = [*tokens[:num_tokens], *[0] * (-num_tokens % page_size)]
        return PageKeys(keys._root, keys._salt)._pages(padded, page_size, len(padded))

    patch.setattr(PageKeys, "_pages", PageKeys.pages, raising=False)
    patch.setattr(PageKeys, "pages", pages)


@DEFECTS(scene=test_keys.test_different_texts_have_different_keys)
def keys_are_cut_short(patch):
    """Short hashes collide (vLLM #12621, Megatron #4158)."""
    for module in (prefix_keys,):
        wrap(patch, module, "hash_parts", lambda whole: lambda *parts: whole(*parts)[:1])


@DEFECTS(scene=test_keys.test_different_texts_have_different_keys)
def keys_hash_the_sum_of_their_tokens(patch):
    """Megatron #4158: +31 in one token and -1 in the next give the same key."""
    patch.setattr(prefix_keys, "encode_tokens", lambda tokens: bytes([sum(tokens) % 256]))


@DEFECTS(scene=test_keys.test_different_texts_have_different_keys)
def keys_do_not_chain(patch):
    """A page is found after any other page."""
    for module in (prefix_keys, prefix_tree):
        wrap(patch, module, "page_key", lambda make: lambda parent, tokens: make(b"", tokens))


@DEFECTS(AssertionError, "a hit of|a page that was computed is not kept")
def the_salt_is_ignored(patch):
    """vLLM #51899."""
    wrap(
        patch,
        PageKeys,
        "__init__",
        lambda init: lambda keys, root, salt: init(keys, root, None),
    )


@DEFECTS(scene=test_keys.test_different_texts_have_different_keys)
def keys_ignore_the_page_size(patch):
    """Groups of different page sizes have one chain of keys."""
    wrap(
        patch,
        PageKeys,
        "pages",
        lambda pages: lambda keys, tokens, size, n: pages(keys, tokens, 2, n),
    )


@DEFECTS(AssertionError, "a hit of|a page that was computed is not kept")
def the_tokens_are_not_compared(patch):
    """A hit on the digest alone, of one byte."""

    def find(tree, key):
        return tree._nodes.get(key.digest)

    keys_are_cut_short(patch)
    patch.setattr(PrefixTree, "find", find)


@DEFECTS(CorruptBooks)
def the_last_page_of_a_name_replaces_the_first(patch):
    """Registration is not idempotent."""

    def make(add):
        def replace(tree, key, page, index, tick):
            node = tree._nodes.get(key.digest)
            if node is not None:
                node.page = page
            return add(tree, key, page, index, tick)

        return replace

    wrap(patch, PrefixTree, "add", make)


@DEFECTS(AssertionError, "a hit of")
def every_page_of_a_sequence_is_kept_again(patch):
    """A duplicate gets an entry of its own."""
    patch.setattr(PrefixTree, "find", lambda tree, key: None)


@DEFECTS(CorruptBooks)
def removing_a_page_removes_its_equals(patch):
    """The entry of another page with the same tokens goes too."""

    def make(remove):
        def greedy(tree, node, tick):
            if tree.find(node.key) is None:
                return
            remove(tree, node, tick)
            for other in [
                one for one in tree if one.key.tokens == node.key.tokens and not one.children
            ]:
                remove(tree, other, tick)

        return greedy

    wrap(patch, PrefixTree, "remove", make)


@DEFECTS(CorruptBooks)
def removing_a_page_leaves_its_entry(patch):
    """The entry of an evicted page is still hit."""
    patch.setattr(PrefixTree, "remove", lambda tree, node, tick: None)


@DEFECTS(CorruptBooks)
def a_clear_leaves_the_entries(patch):
    patch.setattr(PrefixTree, "clear", lambda tree: [node.page for node in tree])


@DEFECTS(AssertionError, "pages are kept after a clear")
def a_clear_leaves_the_references(patch):
    """Leak of the whole cache at a reset."""

    def clear(index):
        for tree in index._trees.values():
            tree.clear()
        index._epoch += 1

    patch.setattr(PrefixIndex, "clear", clear)


@DEFECTS(scene=test_index.test_a_sequence_that_began_before_a_clear_publishes_nothing)
def a_clear_begins_no_epoch(patch):
    """Stale pages are published after the weights changed."""

    def make(clear):
        def same(index):
            clear(index)
            index._epoch -= 1

        return same

    wrap(patch, PrefixIndex, "clear", make)


@DEFECTS(AssertionError, "a page of a failed sequence is still kept")
def a_failed_sequence_leaves_its_pages(patch):
    """NaN is served to others (vLLM #50283)."""
    patch.setattr(PrefixIndex, "withdraw", lambda index, seq: 0)


@DEFECTS(
    ValueError,
    "cached pages after it",
    scene=test_keeper.test_a_page_that_only_the_index_holds_is_had_even_if_pages_in_use_follow_it,
)
def what_follows_a_failed_page_stays(patch):
    """Orphans of a withdrawn page."""
    patch.setattr(prefix_tree, "_branches", lambda roots, followers: list(roots))


@DEFECTS(scene=test_lookup.test_recurrent_groups_skip_nothing_without_a_checkpoint)
def recurrent_groups_are_skipped(patch):
    """vLLM #47491: pages make a hit though the state is missing."""

    def make(init):
        def bold(index, layout, books, **options):
            init(index, layout, books, **options)
            index._hits.never = ""

        return bold

    wrap(patch, PrefixIndex, "__init__", make)

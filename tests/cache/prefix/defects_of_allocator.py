"""Defects of the page pool and the page allocator that other projects shipped."""

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.pool import PagePool
from jaxkv.cache.sequence_pages import SequencePages
from jaxkv.errors import CorruptBooks
from tests.defects import Defects, wrap

DEFECTS = Defects()


@DEFECTS(CorruptBooks)
def release_frees_what_others_hold(patch):
    """Double free: vLLM #1556."""

    def release(pool, pages):
        for page in pages:
            pool._references[page] -= 1
            pool._num_idle += page in pool._kept and pool._references[page] == 1
        pool._free.extend(pages)
        return list(pages)

    patch.setattr(PagePool, "release", release)


@DEFECTS(CorruptBooks)
def release_takes_a_page_twice(patch):
    """vLLM #42571: the same block twice in one call."""

    def make(release):
        return lambda pool, pages: release(pool, pages) + (pool._free.extend(pages[:1]) or [])

    wrap(patch, PagePool, "release", make)


@DEFECTS(CorruptBooks)
def share_counts_nobody(patch):
    """Counter drift: SGLang #35270."""
    patch.setattr(PagePool, "share", lambda pool, pages: None)


@DEFECTS(CorruptBooks)
def share_forgets_the_last_page(patch):
    """Counter drift."""
    wrap(
        patch, PagePool, "share", lambda share: lambda pool, pages: share(pool, pages[:-1] or pages)
    )


@DEFECTS(CorruptBooks)
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


@DEFECTS(AssertionError, "not as many pages were evicted|a failed reserve changed")
def releasing_keeps_the_reference(patch):
    """Leak of every evicted page."""

    def release_kept(pool, page):
        pool._num_idle -= pool._references[page] == 1
        pool._kept.remove(page)

    patch.setattr(PagePool, "release_kept", release_kept)


@DEFECTS(CorruptBooks)
def keeping_takes_no_reference(patch):
    """The index refers to pages that are free."""
    patch.setattr(PagePool, "keep", lambda pool, page: pool._kept.add(page))


@DEFECTS(CorruptBooks)
def an_end_leaks_the_last_page(patch):
    """Leak on abort: vLLM #14326, SGLang #20182."""

    def make(release):
        def leak(books, seq):
            held = books._held[seq]
            held.pages.update({name: pages[:-1] for name, pages in held.pages.items()})
            release(books, seq)

        return leak

    wrap(patch, PageAllocator, "release", make)


@DEFECTS(CorruptBooks)
def an_end_gives_back_one_group_only(patch):
    """Leak on abort, in a cache of several groups."""

    def release(books, seq):
        held = books._held.pop(seq)
        del books._views[seq]
        name = next(iter(books._pools))
        books._pools[name].release(held.ids(name))

    patch.setattr(PageAllocator, "release", release)


@DEFECTS(CorruptBooks)
def a_hit_is_not_pinned(patch):
    """vLLM #37164: a cached block is stolen between look-up and use."""

    def make(adopt):
        def unpinned(books, seq, match):
            adopt(books, seq, match)
            for name, pages in match.pages.items():
                books._pools[name].release(pages)

        return unpinned

    wrap(patch, PageAllocator, "adopt", make)


@DEFECTS(AssertionError, "a page that others hold is written")
def shared_pages_are_written_without_a_copy(patch):
    """Cross-request leakage: vLLM #39146."""
    patch.setattr(SequencePages, "shared_positions", lambda *_: [])


@DEFECTS(AssertionError, "was not computed|holds another text")
def the_copy_is_never_asked_for(patch):
    """Cross-request leakage: the page is replaced, its contents are not."""
    wrap(patch, SequencePages, "_place_pages", lambda place: lambda *rest: place(*rest) and [])


@DEFECTS(AssertionError, "a failed reserve changed something|more pages were evicted")
def a_failed_reserve_keeps_what_it_took(patch):
    """Megatron #6091: an allocation that fails is partially consumed."""

    def make(reserve):
        def partial(books, seq, num_tokens):
            held = books._held[seq]
            for group in books._layout.paged_groups:
                pool = books._pools[group.name]
                missing = group.pages_for(num_tokens) - len(held.pages[group.name])
                held.append(group.name, pool.take(max(0, min(missing, pool.num_free))))
            return reserve(books, seq, num_tokens)

        return partial

    wrap(patch, PageAllocator, "reserve", make)


@DEFECTS(CorruptBooks)
def a_fork_shares_without_counting(patch):
    """Refcount drift: n samples of one prompt (vLLM #14326)."""

    def fork(books, parent, child):
        books.open(child)
        source, held = books._held[parent], books._held[child]
        held.computed = held.writable = held.reserved = source.computed
        held.pages.update(source.pages)
        held.unneeded.update(source.unneeded)

    patch.setattr(PageAllocator, "fork", fork)


@DEFECTS(CorruptBooks)
def places_before_the_window_count_as_pages(patch):
    """The filler id is released like a page that was held."""
    patch.setattr(
        SequencePages,
        "ids",
        lambda held, name: (
            tuple(dict.fromkeys(held.pages[name]))
            if name in held.pages
            else held.states[name].owned()
        ),
    )

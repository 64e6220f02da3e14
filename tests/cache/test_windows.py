"""Sliding windows: pages held and freed at every length, budgets, and prefixes that stay cached."""

import itertools

import pytest

from jaxkv.cache.budget import pages_per_sequence, plan_budget
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import gqa, place, sampling, window
from jaxkv.cache.windows import first_page, first_seen, frees_page_at, most_ahead, most_pages
from jaxkv.errors import OutOfPages
from tests.cache.layouts import reserve, slots_of
from tests.cache.prefix.world import World, layout_of

HALF = {"dtype": "bfloat16", "page_size": 4}
LAYOUT = group_layers(place([gqa(1, 2, **HALF), window(1, 2, window=6, **HALF), sampling(5)]))
SIZES = [*itertools.product((1, 2, 4, 7), (1, 2, 3, 4, 8, 17))]


def group_of(page_size, reach):
    return layout_of((page_size, reach)).groups[0]


def attended(reach, position):
    """Returns what the token at a position sees: (position - window, position]."""
    return range(max(0, position - reach + 1), position + 1)


@pytest.mark.parametrize(("page_size", "reach"), SIZES)
def test_a_page_goes_just_when_nobody_to_come_sees_a_token_of_it(page_size, reach):
    """This holds for pages longer than the window too."""
    group = group_of(page_size, reach)
    for length in range(60):
        seen = set().union(*(attended(reach, position) for position in range(length, 80)))
        seen.add(length - 1)  # The last token is kept even where no other sees it.
        needed = [
            page for page in range(80) if seen & {*range(page * page_size, (page + 1) * page_size)}
        ]
        assert first_page(group, length) == needed[0]
        assert first_seen(reach, length) == max(0, min(seen))


@pytest.mark.parametrize(("page_size", "reach"), SIZES)
@pytest.mark.parametrize("ahead", [1, 3, 9])
def test_a_sequence_holds_no_more_pages_than_its_bound_and_sometimes_as_many(
    page_size, reach, ahead
):
    group = group_of(page_size, reach)
    held = [
        (length + ahead - 1) // page_size - first_page(group, length) + 1 for length in range(1, 90)
    ]
    bound = most_pages(group, 10**6, ahead)
    assert max(held) == bound
    assert most_ahead(group, bound) >= ahead
    assert most_ahead(group, bound - 1) < ahead
    for page in range(5):
        at = frees_page_at(group, page)
        assert (first_page(group, at - 1), first_page(group, at)) == (page, page + 1)


def test_pages_are_taken_in_every_group_or_in_none():
    """The scarcest group limits a reserve, and a failed reserve takes nothing."""
    for counts in ({"gqa": 2, "window": 4}, {"gqa": 4, "window": 2}):
        allocator = PageAllocator(LAYOUT, counts | {"sampling": 3})
        allocator.open(1)
        with pytest.raises(OutOfPages, match="asked for 3 pages"):
            allocator.reserve(1, 9)
        assert {name: allocator.num_free(name) for name in counts} == counts
        allocator.reserve(1, 8)
        assert {name: allocator.num_free(name) for name in counts} == {
            name: count - 2 for name, count in counts.items()
        }


def test_groups_without_a_window_take_a_whole_text_at_once_and_windows_what_is_next():
    allocator = PageAllocator(LAYOUT, {"gqa": 9, "window": 4, "sampling": 3})
    allocator.open(1)
    _, taken = reserve(allocator, 1, 5, whole=33)
    assert {name: len(pages) for name, pages in taken.items()} == {"gqa": 9, "window": 2}
    with pytest.raises(ValueError, match="can commit 0 to 5 tokens"):
        allocator.commit(1, 6)
    allocator.check()


def test_a_pool_smaller_than_a_sequence_serves_it_page_by_page():
    """Every page is used in turn, the first and the last too, each with one holder."""
    allocator = PageAllocator(LAYOUT, {"gqa": 25, "window": 3, "sampling": 3})
    assert allocator.most_ahead == 4
    assert (
        allocator.longest(frees_out_of_window=True),
        allocator.longest(frees_out_of_window=False),
    ) == (100, 12)
    allocator.open(1)
    used = set()
    for stop in range(4, 101, 4):
        allocator.reserve(1, stop, whole=100)
        used |= {
            slot // 4 for slot in slots_of(allocator, LAYOUT.group("window"), 1, stop - 4, stop)
        }
        allocator.commit(1, stop)
        with pytest.raises(ValueError, match="computed tokens"):
            allocator.free_out_of_window(1, stop + 1)
        free = allocator.num_free("window")
        allocator.free_out_of_window(1, stop)
        assert allocator.num_free("window") <= free + 1
        allocator.check()
    assert used == {0, 1, 2}
    assert allocator.pages(1, "window")[:-3] == (0,) * 22
    allocator.release(1)
    assert allocator.num_free("window") == 3


def test_what_a_chunk_under_way_sees_is_not_given_back():
    """Only collected tokens count, so the next chunk's pages are held beside those that the last one reads."""
    allocator = PageAllocator(LAYOUT, {"gqa": 25, "window": 9, "sampling": 3})
    allocator.open(1)
    allocator.reserve(1, 16)
    allocator.commit(1, 16)  # Sent, not read.
    allocator.reserve(1, 32)
    held = allocator.pages(1, "window")
    # The first page is full with 4 tokens, and the token after 4 + 5 is the first that does not see it.
    for read in range(4 + 5):
        allocator.free_out_of_window(1, read)
    assert allocator.pages(1, "window") == held
    allocator.free_out_of_window(1, 16)
    assert allocator.held(1).unneeded["window"] == (16 - 5) // 4


def test_a_fork_shares_what_is_left_of_a_window():
    allocator = PageAllocator(LAYOUT, {"gqa": 25, "window": 9, "sampling": 3})
    allocator.open(1)
    allocator.reserve(1, 18)
    allocator.commit(1, 18)
    allocator.free_out_of_window(1, 18)
    allocator.fork(1, 2)
    assert allocator.held(2).unneeded["window"] == 3
    allocator.free_out_of_window(1, 18)
    allocator.release(1)
    allocator.check()
    assert allocator.num_free("window") == 7


def test_the_budget_counts_each_group_by_its_own_heads_and_the_windows_alone():
    """The bytes are those of the arrays; each group has another head size."""
    specs = [window(2, 8, window=16, **HALF), gqa(4, 16, **HALF)]
    layout = group_layers(place([*specs, *specs, sampling(5)]))
    for budget_bytes in (None, 50_000, 200_000, 900_000, 9_000_000):
        plan = plan_budget(layout, budget_bytes, max_sequences=8, max_tokens=256, ahead=32)
        nbytes = sum(array.nbytes for array in layout.arrays(plan.counts))
        assert nbytes == plan.bytes <= plan.budget_bytes
    windows, whole = (layout.group(name) for name in ("window", "gqa"))
    plan = plan_budget(layout, None, max_sequences=8, max_tokens=256, ahead=32)
    each = pages_per_sequence(windows, 256, 32)
    assert each == 5
    assert plan.counts["window"] == 8 * each + 32 // 4 + 1
    assert plan.counts["gqa"] == 8 * 64
    assert plan.num_sequences == 8
    assert "up to 32 tokens over all sequences" in plan.explain()
    kept = plan_budget(layout, None, max_sequences=8, max_tokens=256)
    assert kept.counts["window"] == kept.counts["gqa"] == 8 * 64
    assert whole.window is None


def test_more_sequences_fit_the_same_memory_for_what_their_windows_let_go():
    """Five of six layers see 16 tokens of 256, so a quarter of the memory is enough for as many sequences."""
    specs = [*[window(2, 8, window=16, **HALF)] * 5, gqa(2, 8, **HALF), sampling(5)]
    layout = group_layers(place(specs))
    sizes = {"max_sequences": 64, "max_tokens": 256}
    memory = plan_budget(layout, None, **sizes).bytes // 4
    fitting = [
        plan_budget(layout, memory, **sizes, ahead=ahead).num_sequences for ahead in (None, 32)
    ]
    assert fitting == [15, 64]


@pytest.mark.parametrize("max_tokens", [3, 16, 24])
def test_windows_never_get_more_than_whole_sequences_would(max_tokens):
    """Short texts, whose windows see all of them, are planned for as if there were no windows."""
    specs = [window(2, 8, window=16, **HALF), gqa(4, 16, **HALF), sampling(5)]
    layout = group_layers(place(specs))
    plans = [
        plan_budget(layout, None, max_sequences=8, max_tokens=max_tokens, ahead=ahead)
        for ahead in (None, 64)
    ]
    assert plans[0].counts == plans[1].counts
    assert plans[1].num_sequences == 8


def computed(world, *texts):
    """Computes texts one after the other; what they filled is kept."""
    for text in texts:
        seq = world.adopt(text)
        assert world.step(seq, len(text))
        world.collect(seq)
        world.release(seq)


def world_of(*sizes, pages=60):
    layout = layout_of(*sizes)
    return World(layout, {group.name: pages for group in layout.groups})


def hit(world, text):
    return world.index.match(text, world.index.keys()).num_tokens


def test_a_hit_needs_just_the_window_before_it():
    """Pages before the window may be gone. If one within it is gone, a shorter hit is found."""
    text = list(range(1, 9))
    for missing in range(8):
        world = world_of((1, None), (1, 4))
        computed(world, text)
        tree = world.index._trees["group1"]
        (node,) = [node for node in tree if node.index == missing]
        world.index._remove("group1", node)
        wanted = 8 if missing < 5 else missing
        assert hit(world, [*text, 9]) == wanted
        world.check_matches([(None, [*text, 9])])
        told = world.index.explain([*text, 9])
        assert told.window_limited == 8 - wanted
        assert ("windows: " in str(told)) == (wanted < 8)


def test_the_texts_of_the_sglang_test_are_hit_as_far_as_their_windows_are_kept():
    """Of its four texts over a window of 4, each hit is the longest that is valid after any eviction."""
    texts = [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7], [10, 11, 12], [1, 2, 3, 4, 5, 60, 70]]
    world = world_of((1, None), (1, 4))
    computed(world, *texts)
    probes = [(None, [*text, 99]) for text in (*texts, [1, 2, 3, 4, 5])]
    for name, count in (("group0", 1), ("group1", 1), ("group0", 1), ("group1", 2)):
        world.evict(name, count)
        world.check()
        world.check_matches(probes)
    assert hit(world, [1, 2, 3, 4, 5, 60, 70, 99]) == 7


def test_the_window_at_the_end_of_a_text_goes_last():
    """No cliff (SGLang #35515): a newer text's middle goes before an older text's tail."""
    old, new = [1, 2, 3, 4, 5, 6, 7, 8], [21, 22, 23, 24, 25, 26, 27, 28]
    world = world_of((1, None), (1, 4))
    computed(world, old, new)
    world.evict("group1", 2 * (8 - 3))
    assert (hit(world, [*old, 0]), hit(world, [*new, 0])) == (8, 8)
    world.evict("group1", 1)
    assert (hit(world, [*old, 0]), hit(world, [*new, 0])) == (0, 8)


def test_where_a_text_went_on_is_no_tail_unless_others_began_there():
    text = list(range(1, 13))
    world = world_of((1, None), (1, 4))
    seq = world.adopt(text)
    for stop in (6, 12):
        assert world.step(seq, stop)
        world.collect(seq)
    tails = {node.index for node in world.index._trees["group1"] if node.tail}
    assert tails == {9, 10, 11}
    computed(world, [*text[:6], 50])  # Begins at 6, so that its window is worth keeping.
    tails = {node.index for node in world.index._trees["group1"] if node.tail}
    assert tails >= {3, 4, 5, 9, 10, 11}
    world.evict("group1", sum(not node.tail for node in world.index._trees["group1"]))
    assert hit(world, [*text[:6], 51]) == 6
    assert hit(world, [*text, 51]) == 12


def test_what_was_evicted_of_a_window_is_kept_again_when_it_is_computed_again():
    """The boundary lies at the start, inside and at the end of the missing part. No page is kept twice."""
    text = list(range(1, 9))
    for gone in itertools.combinations(range(8), 3):
        world = world_of((1, None), (1, 4))
        computed(world, text)
        tree = world.index._trees["group1"]
        for node in [node for node in tree if node.index in gone]:
            world.index._remove("group1", node)
        computed(world, [*text, 9])
        world.check()
        assert hit(world, [*text, 9, 10]) == 9

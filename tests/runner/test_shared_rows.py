"""Rows that begin with the same pages: what is found can be read together, and little that could be is left out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.runner.shared_rows import FEWEST_SHARING, find_shared, may_save
from pallas_kernels.shared_keys import ROWS_PER_TILE, SHARED_GRAIN
from tests.example_counts import examples


def found_in(pages, lengths, page_size, token_bytes=2**28):
    """By default the bytes of one token are worth a launch."""
    return find_shared(pages, lengths, page_size=page_size, token_bytes=token_bytes)


@st.composite
def families(draw):
    """Page ids of rows as a prefix cache gives them: an id is at one place, behind the same ids before it."""
    page_size = draw(st.sampled_from([16, 64, 128]))
    ids, rows = iter(range(10**6)), []

    def grow(before, depth):
        pages = before + [next(ids) for _ in range(draw(st.integers(0, 9)))]
        if depth == 0:
            rows.append(pages)
            return
        for _ in range(draw(st.integers(1, 12 if depth == 1 else 3))):
            grow(pages, depth - 1)

    grow([], draw(st.integers(1, 3)))
    rows = draw(st.permutations(rows))
    spare = st.integers(0, page_size)
    lengths = [max(0, len(pages) * page_size - draw(spare)) for pages in rows]
    return rows, lengths, page_size


def tiles_of(found):
    """The rows of each tile."""
    tiles = [[] for _ in found.lens]
    for row, place in zip(found.rows.tolist(), found.places.tolist(), strict=True):
        tile, at = divmod(place, ROWS_PER_TILE)
        assert at == len(tiles[tile]), "a tile's rows are at its first places"
        tiles[tile].append(row)
    return tiles


@settings(max_examples=examples(100))
@given(families())
def test_rows_of_a_tile_agree_as_far_as_they_share(family):
    pages, lengths, page_size = family
    found = found_in(pages, lengths, page_size)
    if found is None:
        return
    tiles = tiles_of(found)
    assert len(tiles) <= len(pages) // FEWEST_SHARING
    placed = [row for tile in tiles for row in tile]
    assert len(placed) == len(set(placed))
    for members, length in zip(tiles, found.lens.tolist(), strict=True):
        assert members
        assert length > 0
        assert length % SHARED_GRAIN == length % page_size == 0
        assert all(length <= lengths[row] for row in members)
        assert len({tuple(pages[row][: length // page_size]) for row in members}) == 1


def saved(pages, lengths, page_size):
    """The reads that tiles save."""
    found = found_in(pages, lengths, page_size)
    if found is None:
        return 0
    return sum(
        (len(rows) - 1) * length
        for rows, length in zip(tiles_of(found), found.lens.tolist(), strict=True)
    )


@settings(max_examples=examples(50))
@given(families())
def test_no_single_prefix_of_all_rows_would_save_more(family):
    pages, lengths, page_size = family
    all_of_them = tuple(
        zip(
            *(row[: length // page_size] for row, length in zip(pages, lengths, strict=True)),
            strict=False,
        )
    )
    common = next((at for at, ids in enumerate(all_of_them) if len(set(ids)) > 1), len(all_of_them))
    length = common * page_size // SHARED_GRAIN * SHARED_GRAIN
    by_one = (len(pages) - -(-len(pages) // ROWS_PER_TILE)) * length
    if len(pages) >= FEWEST_SHARING and by_one >= sum(lengths) / 2:
        assert saved(pages, lengths, page_size) >= by_one


def samples(prompts, each, own=2, prompt=16, system=0):
    """Rows of some prompts with samples each, behind a system prompt, in turn."""
    before = list(range(system))
    return [
        before
        + [1000 * (number + 1) + at for at in range(prompt)]
        + [10**6 + 1000 * number + 10 * sample + at for at in range(own)]
        for sample in range(each)
        for number in range(prompts)
    ]


def test_samples_of_one_prompt_share_the_prompt():
    pages = samples(4, 8)
    found = found_in(pages, [18 * 64] * 32, 64)
    assert found.lens.tolist() == [16 * 64] * 4
    assert sorted(found.rows.tolist()) == list(range(32))


def test_samples_behind_a_system_prompt_share_what_saves_more():
    """Short prompts: all rows share the system prompt alone. Long ones: each prompt's samples share both."""
    short = found_in(samples(4, 8, prompt=1, system=32), [35 * 64] * 32, 64)
    assert short.lens.tolist() == [33 * 64] * 4
    unequal = found_in(samples(16, 2, prompt=1, system=32), [35 * 64] * 32, 64)
    assert unequal.lens.tolist() == [32 * 64] * 4, "two samples are too few for a group"
    long = found_in(samples(4, 8, prompt=32, system=2), [36 * 64] * 32, 64)
    assert long.lens.tolist() == [34 * 64] * 4


def test_rows_beside_longer_groups_share_what_they_have_in_common():
    pages = samples(1, 8, prompt=16, system=8) + samples(8, 1, prompt=1, system=8)
    found = found_in(pages, [64 * len(row) for row in pages], 64)
    assert sorted(found.lens.tolist()) == [8 * 64, 24 * 64]


def test_little_in_common_is_not_worth_a_launch():
    pages, lengths = samples(1, 8, prompt=64), [66 * 64] * 8
    assert found_in(pages, lengths, 64, token_bytes=2**28 // (7 * 64 * 64)) is None
    assert found_in(pages, lengths, 64, token_bytes=2**28 // (7 * 64 * 64) + 1) is not None
    assert found_in(samples(1, 3), [18 * 64] * 3, 64) is None, "too few rows"
    assert found_in(samples(8, 1), [18 * 64] * 8, 64) is None, "nothing in common"
    assert found_in([[0]] * 8, [0] * 8, 64) is None, "no token yet"


def test_few_rows_share_only_what_is_half_of_their_keys():
    """They run in a program of more rows, which reads the other keys of each with fewer blocks."""
    for rows, own, shares in ((8, 6, True), (8, 8, False), (64, 8, True), (64, 22, False)):
        pages = samples(1, rows, own=own, prompt=8)
        found = found_in(pages, [(8 + own) * 64] * rows, 64)
        assert (found is not None) is shares, (rows, own)


def test_rows_that_end_at_many_depths_of_one_chain_are_found_without_end():
    """Each is a prefix of the next, as the turns of one conversation are; groups within groups are bounded."""
    pages = [[*range(2000 + depth), 10**6 + depth] for depth in range(1500)]
    found = found_in(pages, [64 * len(row) for row in pages], 64)
    assert found.lens.min() == 2000 * 64
    assert len(set(found.lens.tolist())) <= 8


def test_what_may_be_saved_bounds_what_is_found():
    assert may_save(64, 1024, 4096 * 2)
    assert not may_save(3, 2**20, 2**20), "too few rows"
    assert not may_save(64, 1024, 4096), "7/8 of 256 MiB"
    assert not may_save(256, 2**17, 0), "no group of keys and values"


def test_a_page_that_a_row_still_writes_is_not_shared():
    """Its last token may be one that the others do not have."""
    pages = samples(1, 8, own=1, prompt=4)
    assert found_in(pages, [4 * 64 - 1] * 8, 64).lens.tolist() == [3 * 64]


def test_small_pages_are_shared_in_whole_tiles_of_keys():
    pages = samples(1, 8, prompt=11)
    assert found_in(pages, [13 * 16] * 8, 16).lens.tolist() == [2 * 64]

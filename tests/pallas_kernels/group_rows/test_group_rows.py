"""`group_rows`: rows by group, then by token; its kernel's code in NumPy for any choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import group_rows
from pallas_kernels.dispatch import Unsupported, fallbacks
from pallas_kernels.group_rows import mosaic_gpu
from pallas_kernels.group_rows.mosaic_places import Plan, find_starts, place_token
from tests.pallas_kernels.contract import implementations
from tests.pallas_kernels.mosaic.numpy_threads import NumpyThreads, Race, without_barrier

# Tokens, choices, groups, width.
SIZES = (
    (1, 10, 512, 64),
    (8, 10, 512, 2048),
    (40, 4, 1000, 40),
    (256, 16, 1024, 64),
    (33, 4, 32, 2880),
    (5, 3, 7, 24),
)
# Tiles of several tokens, of which the last one has fewer, and all of one group.
PROMPTS = (
    (512, 10, 512, 2048),
    (517, 4, 32, 2880),
    (2048, 8, 128, 256),
    (8192, 8, 128, 64),
    (5000, 1, 1, 64),
    (140, 512, 512, 64),
    (150, 16, 1024, 8184),
)


def drawn(tokens, count, groups, *, alike=False):
    """Returns the choices of tokens, which are different or all the same."""
    draw = np.random.default_rng(tokens)
    chosen = np.stack([draw.permutation(groups)[:count] for _ in range(tokens)])
    return np.asarray(chosen[:1].repeat(tokens, axis=0) if alike else chosen, np.int32)


def by_hand(x, chosen, groups):
    """Returns what `group_rows` returns, pair by pair."""
    pairs = sorted((group, token) for token, row in enumerate(chosen) for group in row)
    places = {pair: row for row, pair in enumerate(pairs)}
    return (
        np.stack([x[token] for _, token in pairs]),
        np.asarray([group for group, _ in pairs]),
        np.asarray([[places[group, token] for group in row] for token, row in enumerate(chosen)]),
        np.bincount(chosen.reshape(-1), minlength=groups),
    )


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(other, np.float64))


@implementations("xla", "mosaic_gpu")
@pytest.mark.parametrize("alike", [False, True], ids=["different", "alike"])
@pytest.mark.parametrize(
    ("tokens", "count", "groups", "width"),
    [*SIZES, *(pytest.param(*sizes, marks=pytest.mark.gpu) for sizes in PROMPTS)],
)
def test_rows_are_those_of_each_group_in_the_order_of_tokens(
    implementation, tokens, count, groups, width, alike
):
    chosen = drawn(tokens, count, groups, alike=alike)
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(tokens, width)), dtype)
        found = group_rows(x, chosen, groups, implementation=implementation)
        assert found[0].dtype == dtype
        assert_same(found, by_hand(np.asarray(x), chosen, groups))


def in_numpy(chosen, groups, *, blocks=2, numbers=None, threads=NumpyThreads):
    """Runs the kernel's code for `blocks` blocks or those of `numbers`; returns all but the rows, and their tokens."""
    plan = Plan.of(*chosen.shape, groups, blocks)
    row_tokens, row_groups, places = (np.full(plan.pairs, -1, np.int32) for _ in range(3))
    sizes = np.full(groups, -1, np.int32)
    for block in range(plan.blocks) if numbers is None else numbers:
        run, words = threads(), [np.full(128, at, np.int32) for at in divmod(block, plan.shares)]
        first, share = words[0] * plan.tile, words[1]
        counts, rows, sums = (np.full(size, -7, np.int32) for size in (*plan.scratch, 4))
        find_starts(run, chosen.reshape(-1), sizes, counts, rows, sums, first, share, plan=plan)
        for turn in range(min(plan.tile, plan.tokens - first[0])):
            turns = np.full(128, turn, np.int32)
            place_token(run, row_groups, places, counts, rows, first, share, turns, plan=plan)
            for choice in range(share[0], plan.count, plan.shares):
                # All threads copy each row.
                [row] = set(run.load(rows, turns * plan.count + choice))
                row_tokens[row] = first[0] + turn
    return row_tokens, row_groups, places.reshape(chosen.shape), sizes


@pytest.mark.parametrize(
    ("tokens", "count", "groups", "blocks"),
    [
        (256, 16, 1024, 132),
        (1, 1, 1, 132),
        (3, 1024, 1024, 2),
        (256, 1, 1, 132),
        (33, 4, 129, 5),
        (1, 10, 512, 132),
        (514, 8, 512, 5),
    ],
)
def test_the_kernels_code_finds_the_places_at_the_limits_of_its_sizes(
    tokens, count, groups, blocks
):
    chosen = drawn(tokens, count, groups)
    row_tokens, *found = in_numpy(chosen, groups, blocks=blocks)
    x = np.arange(tokens)[:, None]
    assert_same((row_tokens[:, None], *found), by_hand(x, chosen, groups))


@pytest.mark.parametrize("alike", [False, True], ids=["different", "alike"])
def test_the_kernels_code_finds_the_places_of_a_prompt(alike):
    """Of its first tile, of one amid it, and of the last one, which has fewer tokens."""
    chosen, groups = drawn(8192, 8, 128, alike=alike), 128
    plan = Plan.of(8192, 8, groups, 132)
    last = plan.blocks - 1
    row_tokens, row_groups, places, sizes = in_numpy(
        chosen, groups, blocks=132, numbers=(0, 77, last)
    )
    x = np.arange(8192)[:, None]
    wanted_tokens, wanted_groups, wanted_places, wanted_sizes = by_hand(x, chosen, groups)
    np.testing.assert_array_equal(sizes, wanted_sizes)
    assert 0 < 8192 - last * plan.tile < plan.tile
    for first in (0, 77 * plan.tile, last * plan.tile):
        tile = slice(first, first + plan.tile)
        np.testing.assert_array_equal(places[tile], wanted_places[tile])
        rows = places[tile].reshape(-1)
        np.testing.assert_array_equal(row_tokens[rows], wanted_tokens[rows, 0])
        np.testing.assert_array_equal(row_groups[rows], wanted_groups[rows])


@pytest.mark.parametrize(
    ("tokens", "count", "tile", "shares"),
    [
        (1, 10, 1, 10),
        (8, 10, 1, 10),
        (64, 10, 1, 2),
        (64, 1, 1, 1),
        (133, 9, 2, 1),
        (8192, 8, 63, 1),
    ],
)
def test_blocks_share_the_rows_of_a_few_tokens_and_have_tiles_of_many(tokens, count, tile, shares):
    plan = Plan.of(tokens, count, 512, 132)
    assert (plan.tile, plan.shares) == (tile, shares)
    assert plan.blocks <= 132


@pytest.mark.parametrize("left_out", [0, 1, 2, 4, 5, 6])
def test_a_barrier_that_is_left_out_is_a_race(left_out):
    """Number 3 frees the table of sums for a next one; number 5 is that behind the first token."""
    with pytest.raises(Race):
        in_numpy(drawn(128, 32, 129), 129, threads=without_barrier(left_out))


def test_choices_that_are_not_allowed_are_neither_read_nor_written_out_of_bounds():
    """Under a trace they are not checked. A group that is not there counts as the nearest one that is."""

    class Lenient(NumpyThreads):
        # Two pairs have one row.
        refuses_races = False

    chosen = np.asarray([[0, 1, 9], [-3, 1, 2]], np.int32)
    assert_same(in_numpy(chosen, 4), in_numpy(np.clip(chosen, 0, 3), 4))
    twice = np.concatenate([chosen, chosen[:, :1]], axis=1)
    _, _, places, sizes = in_numpy(twice, 4, threads=Lenient)
    assert ((places >= 0) & (places < twice.size)).all()
    assert sizes.sum() == twice.size


@given(st.data())
def test_the_kernels_code_finds_the_places_of_any_choices(data):
    """With blocks that share tokens or have several, and with one group per thread or several."""
    tokens, groups = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 300))
    count = data.draw(st.integers(1, min(groups, 9)))
    blocks = data.draw(st.integers(1, 9))
    alike, seed = data.draw(st.booleans()), data.draw(st.integers(0, 9))
    draw = np.random.default_rng(seed)
    chosen = np.stack([draw.permutation(groups)[:count] for _ in range(tokens)]).astype(np.int32)
    chosen = chosen[:1].repeat(tokens, axis=0) if alike else chosen
    row_tokens, *found = in_numpy(chosen, groups, blocks=blocks)
    x = np.arange(tokens)[:, None]
    assert_same((row_tokens[:, None], *found), by_hand(x, chosen, groups))


@pytest.mark.parametrize(
    ("tokens", "count", "groups"),
    [(3, 2, 5), (1, 3, 4)],
    ids=["tiles of two tokens and of one", "a token that two blocks share"],
)
def test_interpreted_the_kernel_copies_the_rows_without_a_race(tokens, count, groups, races):
    chosen = drawn(tokens, count, groups)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(tokens, 24)), jnp.bfloat16)
    found = mosaic_gpu.group_rows(x, jnp.asarray(chosen), groups=groups, blocks=2, interpret=True)
    assert_same(found, by_hand(np.asarray(x), chosen, groups))
    assert not races()


def test_wrong_arguments_are_told(as_in_production):
    x, chosen = np.zeros((2, 8), np.float32), np.asarray([[0, 1], [1, 2]], np.int32)
    with pytest.raises(ValueError, match="there are 2 groups, but a token chooses group 2"):
        group_rows(x, chosen, 2)
    with pytest.raises(ValueError, match="chooses a group twice"):
        group_rows(x, np.asarray([[0, 1], [2, 2]], np.int32), 3)
    with pytest.raises(ValueError, match="chosen must be int32"):
        group_rows(x, chosen.astype(np.int64), 3)
    with pytest.raises(ValueError, match="chosen must have shape"):
        group_rows(x, chosen[:1], 3)
    with pytest.raises(ValueError, match="cannot choose 2 of 1 groups"):
        group_rows(x, chosen, 1)
    with pytest.raises(Unsupported, match="mosaic_gpu"):
        group_rows(x[:, :3], chosen, 3, implementation="mosaic_gpu")


def test_no_tokens_are_an_empty_result():
    x, chosen = np.zeros((0, 8), np.float32), np.zeros((0, 2), np.int32)
    rows, row_groups, places, sizes = group_rows(x, chosen, 3)
    assert (rows.shape, row_groups.shape, places.shape) == ((0, 8), (0,), (0, 2))
    np.testing.assert_array_equal(sizes, [0, 0, 0])


def test_sizes_that_the_kernel_does_not_take_are_no_fallback(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "why_not", mosaic_gpu.refusal)
    before = dict(fallbacks())
    for tokens, count, groups, width in (
        (2**17 + 1, 1, 8, 64),
        (2, 2, 8, 2**14 + 8),
        (2, 2, 2000, 64),
        (2, 2, 8, 3),
    ):
        x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
        chosen = jax.ShapeDtypeStruct((tokens, count), jnp.int32)
        jax.eval_shape(lambda x, chosen, groups=groups: group_rows(x, chosen, groups), x, chosen)
    assert fallbacks() == before

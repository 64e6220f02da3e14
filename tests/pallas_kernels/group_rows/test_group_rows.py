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
@pytest.mark.parametrize(("tokens", "count", "groups", "width"), SIZES)
def test_rows_are_those_of_each_group_in_the_order_of_tokens(
    implementation, tokens, count, groups, width, alike
):
    chosen = drawn(tokens, count, groups, alike=alike)
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(tokens, width)), dtype)
        found = group_rows(x, chosen, groups, implementation=implementation)
        assert found[0].dtype == dtype
        assert_same(found, by_hand(np.asarray(x), chosen, groups))


def in_numpy(chosen, groups, blocks=2, threads=NumpyThreads):
    """Runs the kernel's code for some of its blocks; returns all but the rows, and the token of each row."""
    tokens, count = chosen.shape
    pairs, words = tokens * count, -(-tokens // 32)
    row_groups, places = np.full(pairs, -1, np.int32), np.full(pairs, -1, np.int32)
    sizes = np.full(groups, -1, np.int32)
    for block in range(blocks):
        shared = (groups * words, groups, pairs)
        scratch = [np.full(mosaic_gpu._whole(size), -7, np.int32) for size in shared]
        scratch.append(np.full(4, -7, np.int32))
        mosaic_gpu._find_places(
            threads(),
            chosen.reshape(-1),
            row_groups,
            places,
            sizes,
            *scratch,
            np.full(128, block, np.int32),
            pairs=pairs,
            count=count,
            groups=groups,
            words=words,
        )
    return scratch[2][:pairs], row_groups, places.reshape(chosen.shape), sizes


@pytest.mark.parametrize(
    ("tokens", "count", "groups"),
    [(256, 16, 1024), (1, 1, 1), (4, 1024, 1024), (256, 1, 1), (33, 4, 129)],
)
def test_the_kernels_code_finds_the_places_at_the_limits_of_its_sizes(tokens, count, groups):
    chosen = drawn(tokens, count, groups)
    row_tokens, row_groups, places, sizes = in_numpy(chosen, groups)
    x = np.arange(tokens)[:, None]
    assert_same((row_tokens[:, None], row_groups, places, sizes), by_hand(x, chosen, groups))


@pytest.mark.parametrize("left_out", [0, 1, 2, 4])
def test_a_barrier_that_is_left_out_is_a_race(left_out):
    """Number 3 frees the table of sums for a next one, number 5 is that behind which the rows are copied."""
    with pytest.raises(Race):
        in_numpy(drawn(128, 32, 129), 129, threads=without_barrier(left_out))


def test_choices_that_are_not_allowed_leave_no_row_without_a_token():
    """Under a trace they are not checked. Rows are then those of some token, and nothing is read out of bounds."""

    class Lenient(NumpyThreads):
        # Two pairs store to one row, each its own token.
        refuses_races = False

    chosen = np.asarray([[0, 1, 9], [-3, 1, 2]], np.int32)
    chosen = np.concatenate([chosen, chosen[:, :1]], axis=1)
    row_tokens, _, _, sizes = in_numpy(chosen, 4, threads=Lenient)
    assert set(row_tokens) <= {0, 1}
    assert sizes.sum() <= chosen.size


@given(st.data())
def test_the_kernels_code_finds_the_places_of_any_choices(data):
    """Of one word of tokens or several, with one group per thread or several."""
    tokens, groups = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 300))
    count = data.draw(st.integers(1, min(groups, 9)))
    alike, seed = data.draw(st.booleans()), data.draw(st.integers(0, 9))
    draw = np.random.default_rng(seed)
    chosen = np.stack([draw.permutation(groups)[:count] for _ in range(tokens)]).astype(np.int32)
    chosen = chosen[:1].repeat(tokens, axis=0) if alike else chosen
    row_tokens, row_groups, places, sizes = in_numpy(chosen, groups)
    x = np.arange(tokens)[:, None]
    assert_same((row_tokens[:, None], row_groups, places, sizes), by_hand(x, chosen, groups))


def test_interpreted_the_kernel_copies_the_rows_without_a_race(races):
    chosen = drawn(7, 2, 5)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(7, 24)), jnp.bfloat16)
    found = mosaic_gpu.group_rows(x, jnp.asarray(chosen), groups=5, blocks=2, interpret=True)
    assert_same(found, by_hand(np.asarray(x), chosen, 5))
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
        (257, 1, 8, 64),
        (2, 2, 2000, 64),
        (2, 2, 8, 3),
    ):
        x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
        chosen = jax.ShapeDtypeStruct((tokens, count), jnp.int32)
        jax.eval_shape(lambda x, chosen, groups=groups: group_rows(x, chosen, groups), x, chosen)
    assert fallbacks() == before

"""`row_topk`: the order of a stable sort for every row of any numbers; its kernel's code in NumPy too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import row_topk
from pallas_kernels.dispatch import Unsupported, fallbacks
from pallas_kernels.row_topk import mosaic_gpu
from tests.pallas_kernels.contract import implementations
from tests.pallas_kernels.mosaic.numpy_threads import NumpyThreads

SIZES = ((1, 512, 10), (8, 256, 8), (5, 40, 3), (3, 7, 7), (130, 1024, 32), (64, 8, 4))
NUMBERS = st.sampled_from((0.0, -0.0, 1.0, 1.5, -1.5, np.inf, -np.inf, 1e-40, -1e-40, 3e38))


def drawn(rows, columns):
    """Returns numbers with ties, both zeros and both infinities."""
    draw = np.random.default_rng(rows)
    scores = draw.normal(size=(rows, columns)).astype(np.float32)
    scores[0, ::3] = scores[0, 0]
    scores[-1, 1:3] = np.inf, -np.inf
    scores[rows // 2, 3:6] = -0.0, 0.0, -0.0
    return scores


def sorted_columns(scores, count):
    """Returns the columns of the largest numbers; -0.0 is below 0.0, and above all that are less."""
    is_negative = np.signbit(scores) & (scores == 0)
    order = np.lexsort((is_negative, -scores), axis=1)
    return order[:, :count]


@implementations("xla", "mosaic_gpu")
@pytest.mark.parametrize(("rows", "columns", "count"), SIZES)
def test_the_largest_come_first_and_equal_ones_by_their_column(
    implementation, rows, columns, count
):
    scores = drawn(rows, columns)
    values, found = row_topk(scores, count, implementation=implementation)
    wanted = sorted_columns(scores, count)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == jnp.int32
    assert np.asarray(values).tobytes() == np.take_along_axis(scores, wanted, axis=1).tobytes()


@implementations("xla", "mosaic_gpu")
def test_columns_of_a_row_without_an_order_differ(implementation):
    """So an expert gets a token once, though its scores are lost."""
    scores = np.full((3, 40), np.nan, np.float32)
    scores[1, ::2] = -np.nan
    scores[2, 7] = np.inf
    _, found = row_topk(scores, 32, implementation=implementation)
    for row in np.asarray(found):
        assert len(set(row)) == 32
        assert row.min() >= 0
        assert row.max() < 40


def softmax_of(scores, columns):
    """Returns the softmax of a row's numbers in some columns, in float64."""
    with np.errstate(invalid="ignore"):
        taken = np.take_along_axis(scores.astype(np.float64), columns, axis=1)
        powers = np.exp(taken - taken.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@implementations("xla", "code", "mosaic_gpu")
@pytest.mark.parametrize(("rows", "columns", "count"), [(5, 40, 3), (3, 7, 7), (9, 512, 32)])
def test_the_numbers_taken_may_be_returned_as_their_softmax(implementation, rows, columns, count):
    """Powers of these numbers are no float32; a row without a finite largest number has none."""
    scores = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32) * 8 + 300
    scores[0, 2], scores[1, 4] = np.inf, np.nan
    scores[2] = scores[2, 0]
    if implementation == "code":
        with np.errstate(invalid="ignore"):
            values, found = in_numpy(scores, count, softmax=True)
    else:
        values, found = row_topk(scores, count, softmax=True, implementation=implementation)
    assert np.isnan(np.asarray(values)[0, 0])
    assert np.isnan(np.asarray(values)[1]).all()
    wanted = sorted_columns(scores[2:], count)
    np.testing.assert_array_equal(found[2:], wanted)
    np.testing.assert_allclose(values[2:], softmax_of(scores[2:], wanted), rtol=1e-5, atol=1e-30)


def in_numpy(scores, count, *, softmax=False):
    """Runs the kernel's code for each of its blocks."""
    rows, columns = scores.shape
    values = np.full(rows * count, np.nan, np.float32)
    positions = np.full(rows * count, -1, np.int32)
    for block in range(-(-rows // 4)):
        given_block = np.full(128, block, np.int32)
        mosaic_gpu._take_largest(
            NumpyThreads(),
            scores.reshape(-1),
            values,
            positions,
            given_block,
            rows=rows,
            columns=columns,
            count=count,
            softmax=softmax,
        )
    return values.reshape(rows, count), positions.reshape(rows, count)


def test_the_kernels_code_sorts_the_longest_rows():
    scores = drawn(5, 1024)
    values, positions = in_numpy(scores, 32)
    wanted = sorted_columns(scores, 32)
    np.testing.assert_array_equal(positions, wanted)
    assert values.tobytes() == np.take_along_axis(scores, wanted, axis=1).tobytes()


@given(st.data())
def test_the_kernels_code_sorts_any_numbers(data):
    columns = data.draw(st.integers(1, 70))
    count = data.draw(st.integers(1, min(columns, 32)))
    rows = data.draw(
        st.lists(st.lists(NUMBERS, min_size=columns, max_size=columns), min_size=1, max_size=6)
    )
    scores = np.asarray(rows, np.float32)
    values, positions = in_numpy(scores, count)
    wanted = sorted_columns(scores, count)
    np.testing.assert_array_equal(positions, wanted)
    assert values.tobytes() == np.take_along_axis(scores, wanted, axis=1).tobytes()


def test_the_kernels_code_takes_each_column_once_though_all_are_nan():
    _, positions = in_numpy(np.full((2, 50), np.nan, np.float32), 20)
    np.testing.assert_array_equal(positions, [[*range(20)]] * 2)


def test_interpreted_the_kernel_does_the_same_without_a_race(races):
    scores = drawn(5, 40)
    values, positions = mosaic_gpu.row_topk(jnp.asarray(scores), count=3, interpret=True)
    wanted = sorted_columns(scores, 3)
    np.testing.assert_array_equal(positions, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(scores, wanted, axis=1))
    values, _ = mosaic_gpu.row_topk(jnp.asarray(scores), count=3, softmax=True, interpret=True)
    np.testing.assert_allclose(values[1:4], softmax_of(scores[1:4], wanted[1:4]), rtol=1e-6)
    assert not races()


def test_wrong_arguments_are_told(as_in_production):
    scores = np.zeros((2, 5), np.float32)
    with pytest.raises(ValueError, match="count must be between 1 and the 5 columns, got 6"):
        row_topk(scores, 6)
    with pytest.raises(ValueError, match="count must be between"):
        row_topk(scores, 0)
    with pytest.raises(ValueError, match="must be float32, got int32"):
        row_topk(np.zeros((2, 5), np.int32), 2)
    with pytest.raises(ValueError, match="shape"):
        row_topk(np.zeros(5, np.float32), 2)
    with pytest.raises(Unsupported, match="mosaic_gpu"):
        row_topk(np.zeros((2, 2000), np.float32), 2, implementation="mosaic_gpu")


def test_sizes_that_the_kernel_does_not_take_are_no_fallback(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "why_not", mosaic_gpu.refusal)
    before = dict(fallbacks())
    jax.eval_shape(lambda x: row_topk(x, 2), jax.ShapeDtypeStruct((2, 2000), jnp.float32))
    jax.eval_shape(lambda x: row_topk(x, 40), jax.ShapeDtypeStruct((2, 100), jnp.float32))
    assert fallbacks() == before


def test_no_rows_are_an_empty_result():
    values, positions = row_topk(np.zeros((0, 5), np.float32), 2)
    assert values.shape == positions.shape == (0, 2)

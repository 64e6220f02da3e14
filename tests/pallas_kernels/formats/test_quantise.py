"""What is stored in one byte comes back as near as that byte allows; what is broken never looks like a number."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats.eight_bit import LARGEST
from pallas_kernels.formats.quantise import SMALLEST_SCALE, dequantise, quantise, stored

every_dtype = pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])


def rows(seed=0, *, tokens=64, heads=3, head_dim=128, dtype=np.float32):
    """Rows of very different magnitudes."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((tokens, heads, head_dim))
    return (values * 2.0 ** rng.integers(-40, 40, (tokens, heads, 1))).astype(dtype)


def run(values, dtype):
    stored, scales = jax.jit(quantise, static_argnames="dtype")(jnp.asarray(values), dtype=dtype)
    assert stored.dtype == jnp.dtype(dtype)
    assert scales.dtype == jnp.float32
    return np.array(stored), np.array(scales)


def half_a_step(stored, dtype):
    """Half the distance between neighbours of each stored number, in units of the scale."""
    if dtype == "int8":
        return 0.5
    exponent = np.floor(np.log2(np.maximum(np.abs(stored.astype(np.float64)), 2.0**-6)))
    return 2.0 ** (exponent - 3) / 2


@every_dtype
@pytest.mark.parametrize("given", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_the_error_is_at_most_half_a_step(dtype, given):
    values = rows(dtype=np.float32 if given != np.float16 else np.float64)
    values = (np.clip(values, -6e4, 6e4) if given == np.float16 else values).astype(given)
    stored, scales = run(values, dtype)
    values, scales = values.astype(np.float64), scales[..., None].astype(np.float64)
    # The float32 quotient that is rounded may lie two of its own roundings off.
    slack = np.abs(values) * 2.0**-22
    error = np.abs(stored.astype(np.float64) * scales - values)
    assert (error <= half_a_step(stored, dtype) * scales + slack).all()


@every_dtype
def test_the_largest_of_a_row_is_stored_as_the_largest_there_is(dtype):
    values = rows(1)
    stored, scales = run(values, dtype)
    assert (np.abs(stored.astype(np.float32)).max(-1) == LARGEST[dtype]).all()
    np.testing.assert_allclose(
        scales, np.abs(values).max(-1) / LARGEST[dtype], rtol=2**-22, strict=True
    )


@every_dtype
def test_a_row_has_a_scale_of_its_own(dtype):
    values = rows(2)
    stored, scales = run(values, dtype)
    louder = values.copy()
    louder[3, 1] *= 64
    changed, rescaled = run(louder, dtype)
    assert rescaled[3, 1] == 64 * scales[3, 1]
    rescaled[3, 1] = scales[3, 1]
    assert (rescaled.tobytes(), changed.tobytes()) == (scales.tobytes(), stored.tobytes())


@every_dtype
def test_ties_go_to_even(dtype):
    """The scale is one, so that the numbers are stored as they are."""
    row = np.zeros((1, 1, 8), np.float32)
    ties = {"int8": ([0.5, 1.5, 2.5, -0.5, -1.5], [0, 2, 2, 0, -2])}
    ties["float8_e4m3fn"] = ([17, 19, 21, -17, 2.0**-10], [16, 20, 20, -16, 0])
    given, wanted = ties[dtype]
    row[0, 0, :5], row[0, 0, 7] = given, LARGEST[dtype]
    stored, scales = run(row, dtype)
    assert scales == 1.0
    np.testing.assert_array_equal(stored[0, 0, :5].astype(np.float32), wanted)


@every_dtype
def test_a_million_is_clamped_and_not_turned_into_nan(dtype):
    """A cast to e4m3 makes NaN of 1e6 and of every number above 464."""
    values = np.array([[[1e6, -1e6, 1.0, 0.0], [3.4e38, -3.4e38, 3e38, 1.0]]], np.float32)
    stored, scales = run(values, dtype)
    back = np.asarray(dequantise(jnp.asarray(stored), jnp.asarray(scales)))
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back, values, atol=1e6 / 127, rtol=2**-4)


@every_dtype
def test_what_no_scale_was_made_for_is_clamped_too(dtype):
    """The caller may bring the scales."""
    wide = jnp.asarray([1e6, -1e6, 465.0], jnp.float32)
    numbers = stored(wide, jnp.ones(3), dtype).astype(jnp.float32)
    np.testing.assert_array_equal(numbers, np.array([1, -1, 1]) * LARGEST[dtype])


@every_dtype
def test_no_row_of_finite_numbers_leaves_the_dtypes_range(dtype):
    """The quotient may round to just above the largest number, whatever the magnitude."""
    largest = np.exp2(np.random.default_rng(3).uniform(-115, 127, (2000, 1, 1))).astype(np.float32)
    stored, scales = run(np.concatenate((largest, -largest), axis=-1), dtype)
    assert np.isfinite(scales).all()
    assert (np.abs(stored.astype(np.float32)) == LARGEST[dtype]).all()


@every_dtype
def test_rows_of_zeros_and_of_almost_nothing_stay_finite(dtype):
    values = np.zeros((2, 1, 4), np.float32)
    values[1] = 1e-42
    stored, scales = run(values, dtype)
    np.testing.assert_array_equal(scales, np.float32(SMALLEST_SCALE))
    np.testing.assert_array_equal(stored.astype(np.float32), 0.0)


@every_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_broken_row_comes_back_as_nan_and_breaks_no_other(dtype, bad):
    values = rows(4, tokens=3)
    fine, scales = run(values, dtype)
    values[1, 2, 5] = bad
    stored, marked = run(values, dtype)
    assert np.isnan(marked[1, 2])
    np.testing.assert_array_equal(stored[1, 2].astype(np.float32), 0.0)
    back = np.asarray(dequantise(jnp.asarray(stored), jnp.asarray(marked)))
    assert np.isnan(back[1, 2]).all()
    marked[1, 2], stored[1, 2] = scales[1, 2], fine[1, 2]
    assert (marked.tobytes(), stored.tobytes()) == (scales.tobytes(), fine.tobytes())


def test_other_dtypes_are_refused_by_name():
    with pytest.raises(ValueError, match="not to uint8"):
        quantise(jnp.zeros((1, 1, 4)), jnp.uint8)

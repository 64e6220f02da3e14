"""Buckets: the smallest that fits, and never one that is too small."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.runner.buckets import bucket, power_of_two_buckets


def test_the_maximum_is_always_a_bucket():
    assert power_of_two_buckets(1, 1000)[-1] == 1000
    assert power_of_two_buckets(1, 1000)[:-1] == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert power_of_two_buckets(16, 64) == (16, 32, 64)
    assert power_of_two_buckets(16, 9) == (9,)


@given(st.integers(1, 300), st.integers(1, 5000))
def test_buckets_ascend_and_start_at_the_minimum_or_above(minimum, maximum):
    sizes = power_of_two_buckets(minimum, maximum)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == maximum
    assert sizes[0] >= min(minimum, maximum)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_a_bucket_is_the_smallest_that_holds_the_size(size, maximum):
    sizes = power_of_two_buckets(1, maximum)
    if size > maximum:
        with pytest.raises(ValueError, match=f"{size} is more than the largest bucket, {maximum}"):
            bucket(size, sizes)
    else:
        assert bucket(size, sizes) == min(other for other in sizes if other >= size)


def test_nothing_has_no_bucket():
    # A step of no tokens is refused, not padded to one.
    with pytest.raises(ValueError, match="no bucket for 0"):
        bucket(0, (1, 2))
    with pytest.raises(ValueError, match="at least 1"):
        power_of_two_buckets(0, 8)


def test_more_than_the_largest_bucket_is_an_error_with_the_numbers():
    with pytest.raises(ValueError, match="9 is more than the largest bucket, 8"):
        bucket(9, (2, 8))

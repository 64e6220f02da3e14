"""Equal masks are one array while a request holds it, and masks that differ in one bit are never one."""

import gc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.structured.shared_masks import SharedMasks


def test_equal_masks_become_the_array_of_the_first():
    shared = SharedMasks()
    mask = np.arange(200, dtype=np.uint32)
    assert shared.share(mask) is mask
    assert shared.share(mask.copy()) is mask


@given(st.integers(0, 199), st.integers(0, 31))
def test_masks_that_differ_in_one_bit_stay_two(word, bit):
    shared = SharedMasks()
    mask = np.arange(200, dtype=np.uint32)
    other = mask.copy()
    other[word] ^= np.uint32(1 << bit)
    assert shared.share(mask) is mask
    assert shared.share(other) is other
    assert (mask != other).any()


def test_a_mask_that_no_request_holds_is_forgotten():
    shared = SharedMasks()
    shared.share(np.arange(200, dtype=np.uint32))
    gc.collect()
    again = np.arange(200, dtype=np.uint32)
    assert shared.share(again) is again
    assert len(shared._known) == 1

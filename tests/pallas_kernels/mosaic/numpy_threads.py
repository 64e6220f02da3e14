"""Runs the code of single threads (`pallas_kernels.mosaic.per_thread`) in NumPy, on all threads of a block at once."""

import numpy as np

from pallas_kernels.mosaic.per_thread import LANES, THREADS, Threads
from pallas_kernels.mosaic.warps import WARPS


class NumpyThreads(Threads):
    """References are arrays of one axis with 32 bits an element; a place that is not there is an error."""

    def __init__(self):
        self.number = np.arange(THREADS, dtype=np.int32)
        self.lane, self.warp = self.number % LANES, self.number // LANES

    def select(self, condition, one, other):
        return np.where(condition, np.int32(one), np.int32(other))

    def ones(self, word):
        return np.bitwise_count(word.view(np.uint32)).astype(np.int32)

    def load(self, ref, place):
        assert (place >= 0).all(), "a place before the first element"
        return ref.view(np.int32)[place]

    def store(self, ref, place, word, *, where=None):
        wanted = np.broadcast_to(True if where is None else where, THREADS)
        assert (place[wanted] >= 0).all(), "a place before the first element"
        ref.view(np.int32)[place[wanted]] = np.broadcast_to(np.int32(word), THREADS)[wanted]

    def set_bits(self, ref, place, bits):
        np.bitwise_or.at(ref, place, bits)

    def most_of_warp(self, word):
        return np.repeat(word.reshape(WARPS, LANES).max(axis=1), LANES)

    def least_of_warp(self, word):
        return np.repeat(word.reshape(WARPS, LANES).min(axis=1), LANES)

    def sum_in_warp(self, word):
        return word.reshape(WARPS, LANES).cumsum(axis=1, dtype=np.int32).reshape(-1)

    def repeat(self, count, body):
        for turn in range(max(count)):
            body(np.full(THREADS, turn, np.int32), turn < count)

    def sync(self):
        pass

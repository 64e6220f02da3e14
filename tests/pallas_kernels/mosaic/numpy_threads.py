"""Runs the code of single threads (`pallas_kernels.mosaic.per_thread`) in NumPy, on all threads of a block at once."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic.packed_numbers import (
    numbers_of,
    pairs_of,
    scaled_pairs_of,
    tile_product,
)
from pallas_kernels.mosaic.per_thread import LANES, THREADS, WORDS, Threads
from pallas_kernels.mosaic.warps import WARPS

_NONE, _SEVERAL = -1, -2
_numbers_of = jax.jit(numbers_of, static_argnums=1)
_pairs_of = jax.jit(pairs_of, static_argnums=(1, 2))
_scaled_pairs_of = jax.jit(scaled_pairs_of)
_tile_product = jax.jit(tile_product, static_argnums=2)


class Race(AssertionError):
    """A thread uses what another one has written, or writes what another one uses, without a `sync` between them."""


@dataclass
class _Uses:
    """Who has used the elements of an array since the last `sync`: the thread, none or several."""

    array: np.ndarray
    writers: np.ndarray = field(init=False)
    readers: np.ndarray = field(init=False)
    adders: np.ndarray = field(init=False)

    def __post_init__(self):
        self.forget()

    def forget(self):
        self.writers, self.readers, self.adders = (
            np.full(self.array.size, _NONE) for _ in range(3)
        )

    def note(self, users, place, thread, *, alone):
        """Adds threads to the users of places, and refuses what races with others; `alone` if no two may share one."""
        if alone and len(set(place)) < len(place):
            raise Race("two threads store to one element")
        others = {"writers", "readers", "adders"} - ({users} if not alone else set())
        for name in others if users != "readers" else {"writers", "adders"}:
            found = getattr(self, name)[place]
            if ((found != _NONE) & (found != thread)).any():
                raise Race(f"an element has {name} beside its {users}")
        known = getattr(self, users)
        shared = np.bincount(place, minlength=self.array.size)[place] > 1
        is_first = (known[place] == _NONE) | (known[place] == thread)
        known[place] = np.where(is_first & ~shared, thread, _SEVERAL)


class NumpyThreads(Threads):
    """References are arrays of one axis, with 32 bits an element unless they are only read.

    A place that is not there is an error, and so is a race between threads. What `load_number` and `load_byte` read,
    and `load_words` before the first store there, is taken for read by all and written by none.
    """

    refuses_races = True

    def __init__(self):
        self.number = np.arange(THREADS, dtype=np.int32)
        self.lane, self.warp = self.number % LANES, self.number // LANES
        self._uses = {}

    def _note(self, ref, users, place, thread, *, alone=False):
        assert ((place >= 0) & (place < ref.size)).all(), "a place that is not there"
        if self.refuses_races:
            if id(ref) not in self._uses:
                # With the array, so that no other one gets its id.
                self._uses[id(ref)] = _Uses(ref)
            self._uses[id(ref)].note(users, place, thread, alone=alone)

    def select(self, condition, one, other):
        return np.where(condition, np.int32(one), np.int32(other))

    def load(self, ref, place):
        self._note(ref, "readers", place, self.number)
        return ref.view(np.int32)[place]

    def store(self, ref, place, word, *, where=None):
        wanted = np.broadcast_to(True if where is None else where, THREADS)
        self._note(ref, "writers", place[wanted], self.number[wanted], alone=True)
        ref.view(np.int32)[place[wanted]] = np.broadcast_to(np.int32(word), THREADS)[wanted]

    def load_words(self, ref, place):
        assert (place % WORDS == 0).all(), "words that do not begin where four do"
        words = ref.view(np.int32)
        if id(ref) in self._uses:
            for part in range(WORDS):
                self._note(ref, "readers", place + part, self.number)
        assert ((place >= 0) & (place + WORDS <= words.size)).all(), "a place that is not there"
        return [words[place + part] for part in range(WORDS)]

    def store_words(self, ref, place, words, *, where=None):
        wanted = np.broadcast_to(True if where is None else where, THREADS)
        assert (place[wanted] % WORDS == 0).all(), "words that do not begin where four do"
        for part, word in enumerate(words):
            self.store(ref, place + part, word, where=where)

    def load_byte(self, ref, place):
        assert ((place >= 0) & (place < ref.size)).all(), "a place that is not there"
        return ref[place].astype(np.int32)

    def load_number(self, ref, place):
        assert ((place >= 0) & (place < ref.size)).all(), "a place that is not there"
        return ref[place].astype(np.float32).view(np.int32)

    def load_two_numbers(self, ref, place):
        assert (place % 2 == 0).all(), "two numbers that begin at an odd place"
        return [self.load_number(ref, place + at) for at in (0, 1)]

    def store_number(self, ref, place, number, *, where=None):
        wanted = np.broadcast_to(True if where is None else where, THREADS)
        self._note(ref, "writers", place[wanted], self.number[wanted], alone=True)
        ref[place[wanted]] = number.view(np.float32)[wanted].astype(ref.dtype)

    def numbers(self, word, kind):
        return [
            np.asarray(number).view(np.int32) for number in _numbers_of(jnp.asarray(word), kind)
        ]

    def dot(self, total, word, others, kind):
        for number, other in zip(self.numbers(word, kind), others, strict=True):
            total = self.multiply_add(number, other, total)
        return total

    def pairs(self, word, kind, dtype, zero=None):
        zero = None if zero is None else zero.view(np.float32)
        return [np.asarray(pair) for pair in _pairs_of(word, kind, dtype, zero)]

    def scaled_pairs(self, word, exponent):
        return [np.asarray(pair) for pair in _scaled_pairs_of(word, exponent)]

    def tile_product(self, sums, left, right, dtype):
        found = _tile_product(list(left), list(right), dtype)
        return [
            (total.view(np.float32) + np.asarray(number)).view(np.int32)
            for total, number in zip(sums, found, strict=True)
        ]

    def multiply_add(self, one, other, total):
        one, other, total = (word.view(np.float32) for word in (one, other, total))
        return (one * other + total).view(np.int32)

    def quotient(self, one, other):
        return (one.view(np.float32) / other.view(np.float32)).view(np.int32)

    def power_of_two(self, number):
        with np.errstate(over="ignore"):
            return np.exp2(number.view(np.float32)).view(np.int32)

    def smaller(self, one, other):
        return np.minimum(one.view(np.float32), other.view(np.float32)).view(np.int32)

    def larger(self, one, other):
        return np.maximum(one.view(np.float32), other.view(np.float32)).view(np.int32)

    def total_of_lanes(self, number, count):
        totals = number.view(np.float32).reshape(-1, count).sum(axis=1)
        return np.repeat(totals, count).view(np.int32)

    def add(self, ref, place, amount):
        self._note(ref, "adders", place, self.number)
        np.add.at(ref, place, np.int32(amount))

    def most_of_warp(self, word):
        return np.repeat(word.reshape(WARPS, LANES).max(axis=1), LANES)

    def least_of_warp(self, word):
        return np.repeat(word.reshape(WARPS, LANES).min(axis=1), LANES)

    def sum_in_warp(self, word):
        return word.reshape(WARPS, LANES).cumsum(axis=1, dtype=np.int32).reshape(-1)

    def repeat(self, count, body):
        # The quotient of a negative number would be a large one on a GPU.
        assert (count >= 0).all()
        for turn in range(max(count)):
            body(np.full(THREADS, turn, np.int32), turn < count)

    def fold(self, count, start, body):
        words = list(start)
        for turn in range(count):
            words = body(np.full(THREADS, turn, np.int32), words)
        return words

    def sync(self):
        for uses in self._uses.values():
            uses.forget()


def without_barrier(number):
    """Returns threads that do not wait at the barrier of a number."""

    class Hasty(NumpyThreads):
        met = 0

        def sync(self):
            if self.met != number:
                super().sync()
            self.met += 1

    return Hasty

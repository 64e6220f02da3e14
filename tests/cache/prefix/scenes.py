"""`Cache`: the allocator and prefix index of one small cache, for tests of single operations."""

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix.index import PrefixIndex
from tests.cache.prefix.world import layout_of

ONE = layout_of((1, None))
"""Pages of one token, so that a text reads as a path through the tree."""


class Cache:
    """Allocator and index, and sequences that are computed in one go."""

    def __init__(self, layout, counts, **options):
        self.allocator = PageAllocator(layout, counts)
        self.index = PrefixIndex(layout, self.allocator, **options)
        self.keys = {}
        self.next_seq = 0

    def adopt(self, text, salt=None):
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.keys[seq] = self.index.keys(salt)
        return seq, self.index.adopt(seq, text, self.keys[seq])

    def compute(self, text, salt=None, *, stay=False):
        """Computes a text, publishes it, and ends the sequence unless it is to stay."""
        seq, _ = self.adopt(text, salt)
        self.allocator.reserve(seq, len(text))
        self.allocator.commit(seq, len(text))
        self.index.publish(seq, text, self.keys[seq], len(text))
        self.check()
        if not stay:
            self.allocator.release(seq)
        return seq

    def hit(self, text, salt=None):
        return self.index.match(text, self.index.keys(salt)).num_tokens

    def evict(self, count, group="group0"):
        done = self.index.reclaim({group: count}, {})
        self.check()
        return done

    def check(self):
        self.allocator.check()
        self.index.check()


def full(page_size=16, count=12):
    return Cache(layout_of((page_size, None)), {"group0": count})

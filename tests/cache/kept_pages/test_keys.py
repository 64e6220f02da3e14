"""Keys of pages: equal for equal prefixes under one salt, and different otherwise."""

import itertools

import pytest

from jaxkv.cache.kept_pages.keys import PageKeys, cache_root
from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.prefix.index import PrefixIndex
from tests.cache.prefix.scenes import ONE, full
from tests.cache.prefix.world import layout_of


@pytest.mark.parametrize("salts", [(None, ""), ("", b""), ("a", b"a"), ("a", "b"), (None, "None")])
def test_texts_under_different_salts_share_nothing(salts):
    """Under the same salt they share their pages."""
    cache = full(page_size=2)
    cache.compute([1, 2, 3], salts[0])
    assert [cache.hit([1, 2, 3], salt) for salt in salts] == [2, 0]


def first_key(layout=ONE, text=(1, 2, 3, 4), page_size=2, salt=None, **options):
    options = {"identity": "model", "secret": b"secret"} | options
    counts = {group.name: 9 for group in layout.groups}
    index = PrefixIndex(layout, PageAllocator(layout, counts), **options)
    return index.keys(salt).pages(text, page_size, len(text))[-1].digest


@pytest.mark.parametrize(
    "other",
    [
        {"identity": "model2"},
        {"secret": b"other"},
        {"layout": layout_of((1, 7))},
        {"salt": "tenant"},
        {"page_size": 4},
        {"page_size": 1},
        {"text": (1, 2, 3, 5)},
        {"text": (2, 1, 3, 4)},
        {"identity": "", "secret": b"secretmodel"},
    ],
)
def test_everything_that_changes_a_page_changes_its_key(other):
    assert first_key() == first_key()
    assert len(first_key()) == 32
    assert first_key(**other) != first_key()


def test_keys_differ_between_processes():
    """The root is random. Python's hash(None) is the same in each process."""
    assert first_key(secret=None) != first_key(secret=None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((-1, 3), (-2, 3)),
        ((5, 40), (5 + 31, 40 - 1)),
        ((1, 2), (2, 1)),
        ((0, 0), (0, 256)),
        ((1, 23), (12, 3)),
    ],
)
def test_texts_that_collide_elsewhere_have_different_keys(one, other):
    """Collisions of others: Python's hash of -1 and -2, Megatron's +31 and -1, digits without a separator."""
    assert first_key(text=one) != first_key(text=other)


@pytest.mark.parametrize("token", [2**31, 5 + 2**61 - 1, -(2**31) - 1])
def test_ids_that_are_no_int32_are_refused_rather_than_wrapped(token):
    """In Python, hash(5) == hash(5 + 2**61 - 1)."""
    with pytest.raises(ValueError, match="token ids must be integers that fit int32"):
        first_key(text=(5, token))


def test_different_texts_have_different_keys():
    """The texts are all of 12 tokens of two ids, and all of 4 tokens of four distant ids."""
    cache = full(page_size=4, count=2)
    texts = list(itertools.product((0, 1), repeat=12)) + list(
        itertools.product((0, 31, 2**31 - 1, -1), repeat=4)
    )
    digests = {key.digest for text in texts for key in cache.index.keys().pages(text, 4, len(text))}
    distinct = {text[:end] for text in texts for end in range(4, len(text) + 1, 4)}
    assert len(digests) == len(distinct)


@pytest.mark.slow
def test_a_million_texts_under_two_salts_have_two_million_keys():
    root = cache_root(b"secret", ONE, "model")
    texts = itertools.product(range(1000), repeat=2)
    digests = {
        PageKeys(root, salt).pages(text, 2, 2)[0].digest[:16]
        for text in texts
        for salt in ("one", "two")
    }
    assert len(digests) == 2 * 10**6


def test_a_key_that_collides_is_a_miss(monkeypatch):
    """The tokens are compared on every hit."""
    monkeypatch.setattr("jaxkv.cache.kept_pages.keys.hash_parts", lambda *parts: b"always the same")
    cache = full(page_size=2)
    seq, _ = cache.adopt([1, 2, 3])
    cache.allocator.reserve(seq, 3)
    cache.allocator.commit(seq, 3)
    cache.index.publish(seq, [1, 2, 3], cache.keys[seq], 3)
    assert [cache.hit([1, 2, 3]), cache.hit([4, 5, 6])] == [2, 0]


def test_a_growing_text_is_hashed_once_and_a_copy_goes_its_own_way():
    cache = full(page_size=2)
    keys = cache.index.keys()
    text = [1, 2, 3, 4]
    first = keys.pages(text, 2, 4)
    twin = keys.copy()
    assert keys.pages([*text, 5, 6], 2, 6)[:2] == first[:2]
    assert twin.pages([*text, 7, 8], 2, 6)[2] != keys.pages([*text, 5, 6], 2, 6)[2]
    assert keys.pages(text, 2, 3) == first[:1]

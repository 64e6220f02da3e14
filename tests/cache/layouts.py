"""Layouts that several tests of the cache share."""

from jaxkv.cache.spec import ArraySpec, CacheLayout, PagedSpec, group_layers
from jaxkv.cache.variants import (
    delta,
    dsa,
    gqa,
    mamba2,
    mla,
    place,
    sampling,
    window,
)

MAMBA2 = mamba2(heads=2, head_dim=4, d_state=8, d_conv=4, groups=1, dtype="bfloat16")
DELTA = delta(key_heads=1, value_heads=2, key_dim=4, value_dim=4, d_conv=4, dtype="float16")
HALF = {"dtype": "bfloat16", "page_size": 4}


def every_variant() -> CacheLayout:
    """One layer of each variant, in every dtype we store, and the sampling group."""
    specs = [
        gqa(2, 8, **HALF),
        gqa(2, 8, quantised="fp8", **HALF),
        window(2, 8, window=6, **HALF),
        mla(16, 8, dtype="float32", page_size=4),
        dsa(128, 8, 128, page_size=8),
        MAMBA2,
        DELTA,
        sampling(11, penalties=True, bias_entries=3),
    ]
    return group_layers(place(specs))


def hybrid() -> CacheLayout:
    """Two paged groups of different page sizes, a recurrent group and the sampling group."""
    odd = PagedSpec("odd", (ArraySpec("key", (3,), "uint8"),), page_size=2)
    return group_layers(place([gqa(1, 2, **HALF), odd, MAMBA2, gqa(1, 2, **HALF), sampling(5)]))


def slots_of(allocator, group, seq, start, stop) -> list[int]:
    """Returns where the tokens from `start` to `stop - 1` lie in a paged group: page * page size + offset."""
    pages, size = allocator.pages(seq, group.name), group.page_size
    first = allocator.held(seq).unneeded[group.name] * size
    assert first <= start <= stop <= len(pages) * size, f"tokens {start} to {stop} have no page"
    return [pages[at // size] * size + at % size for at in range(start, stop)]


def reserve(allocator, seq, num_tokens, **options):
    """Reserves; returns the reservation, and group name -> the pages that it took, targets of copies included."""
    before = {name: allocator.pages(seq, name) for name in allocator.held(seq).unneeded}
    reservation = allocator.reserve(seq, num_tokens, **options)
    taken = {}
    for name, old in before.items():
        table = allocator.pages(seq, name)
        taken[name] = [page for at, page in enumerate(table) if page not in old[at : at + 1]]
    return reservation, taken


def counts_of(layout: CacheLayout, count: int) -> dict[str, int]:
    """The same number of pages or states for every group."""
    return {group.name: count for group in layout.groups}

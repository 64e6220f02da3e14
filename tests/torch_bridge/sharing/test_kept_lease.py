"""A lease kept between forwards: one exchange while JAX does not use the cache, with all checks of a lease."""

import jax
import numpy as np
import pytest
import torch

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import Cache
from jaxkv.cache.variants import gqa, place
from jaxkv.errors import CacheLeased, CachePoisoned
from torch_bridge import LeaseLeaked, lease
from torch_bridge.sharing.kept_lease import KeptLease

pytestmark = pytest.mark.torch


@pytest.fixture
def owner():
    return CacheOwner(
        group_layers(place([gqa(2, 16, dtype="float32", page_size=4)] * 2)), {"gqa": 4}
    )


@pytest.fixture
def kept(owner):
    return KeptLease(owner)


@jax.jit(donate_argnums=0)
def add_one(cache):
    return Cache(arrays=tuple(a + 1 for a in cache.arrays), keys=cache.keys), cache.arrays[0].max()


def add_in_torch(kept, number):
    views = kept.borrow()
    views["layer0.key"].add_(number)
    kept.put_down(views)


USES = {
    "run": lambda owner: float(owner.run(add_one)),
    "handle": lambda owner: float(owner.handle().cache.arrays[0].max()),
    "lease": lambda owner: read_in_torch(owner),
}


def read_in_torch(owner):
    with lease(owner, write=False) as views:
        return float(views["layer0.key"].max())


@pytest.mark.parametrize("use", USES)
def test_whoever_asks_has_what_torch_wrote_and_the_cache_again(owner, kept, use):
    old, before = owner.handle(), [a.unsafe_buffer_pointer() for a in owner.handle().cache.arrays]
    for _ in range(3):
        add_in_torch(kept, 2)
    assert kept.num_taken == 1
    assert not owner.borrower
    assert USES[use](owner) == 6
    assert [a.unsafe_buffer_pointer() for a in owner.handle().cache.arrays] == before
    with pytest.raises(CachePoisoned, match="handle is of epoch"):
        old.cache
    add_in_torch(kept, 0.5)
    assert kept.num_taken == 2
    assert float(owner.handle().cache.arrays[0].max()) == 6.5 + (use == "run")


def test_views_are_the_same_from_forward_to_forward(kept):
    first = kept.borrow()
    pointers = [view.data_ptr() for view in first.values()]
    kept.put_down(first)
    second = kept.borrow()
    assert second is first
    assert [view.data_ptr() for view in second.values()] == pointers
    kept.put_down(second)


@pytest.mark.parametrize("use", USES)
def test_any_use_between_borrow_and_put_down_names_the_lease(owner, kept, use):
    for _ in range(2):
        views = kept.borrow()
        with pytest.raises(CacheLeased, match=r"torch, at .*test_kept_lease\.py:\d+"):
            USES[use](owner)
        kept.put_down(views)


KEEPING = {
    "the view": lambda view: view,
    "a slice": lambda view: view[2:3, 0],
    "numpy": lambda view: view.numpy(),
    "a saved tensor": lambda view: torch.ones(16, requires_grad=True) * view,
}


@pytest.mark.parametrize("keep", KEEPING)
def test_what_torch_keeps_is_found_when_it_is_put_down(owner, kept, keep):
    add_in_torch(kept, 1)
    views = kept.borrow()
    held = KEEPING[keep](views["layer1.value"])
    with pytest.raises(LeaseLeaked, match=r"outlive the lease .*: layer1\.value\. Drop"):
        kept.put_down(views)
    with pytest.raises(CacheLeased):
        owner.run(add_one)
    del held
    kept.put_down(views)
    assert float(owner.run(add_one)) == 1


def test_what_torch_took_while_nobody_looked_is_found_when_jax_asks(owner, kept):
    add_in_torch(kept, 1)
    held = kept._lease["layer0.key"][0]
    for use in (lambda: owner.run(add_one), kept.borrow, owner.handle):
        with pytest.raises(LeaseLeaked, match=r"layer0\.key"):
            use()
    del held
    add_in_torch(kept, 1)
    assert float(owner.run(add_one)) == 2


def test_a_failed_forward_poisons_and_a_rebuild_is_the_way_back(owner, kept):
    add_in_torch(kept, 1)
    kept.borrow().abandon("ended in a forward that failed")
    assert owner.poisoned
    with pytest.raises(CachePoisoned):
        kept.borrow()
    owner.rebuild()
    add_in_torch(kept, 3)
    assert float(owner.run(add_one)) == 3


@pytest.mark.parametrize("how", ["rebuild", "poison"])
def test_a_cache_that_is_replaced_or_lost_meanwhile_lets_go_of_its_memory(owner, kept, how):
    add_in_torch(kept, 1)
    views = kept._lease
    owner.poison("the device is broken") if how == "poison" else owner.rebuild()
    assert owner.poisoned == (how == "poison")
    assert not views.is_open
    assert not views._views
    assert not views._arrays
    owner.rebuild()
    add_in_torch(kept, 5)
    assert float(owner.handle().cache.arrays[0].max()) == 5


def test_a_lease_commits_when_its_keeper_goes(owner):
    kept = KeptLease(owner)
    views = kept.borrow()
    views["layer1.key"][3] = 7
    kept.put_down(views)
    del views, kept
    assert not owner.borrower
    np.testing.assert_array_equal(owner.handle().cache.arrays[2][3], np.full((4, 2, 16), 7.0))


def test_a_lease_commits_while_a_function_is_traced(owner):
    def collected(number):
        kept = KeptLease(owner)
        add_in_torch(kept, 2)
        del kept
        return number + 1

    def leased(number, _):
        with lease(owner, write=True) as views:
            views["layer0.key"].add_(3)
            views.commit()
        return number, None

    assert float(jax.jit(collected)(1.0)) == 2
    jax.lax.scan(leased, 0.0, length=2)
    assert float(owner.handle().cache.arrays[0].max()) == 5

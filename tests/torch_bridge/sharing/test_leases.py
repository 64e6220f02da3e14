"""Leases: one at a time, no view after the end, and writes take effect on commit."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import ArraySpec, LayerSpec, StateSpec, group_layers
from jaxkv.cache.state import Cache
from jaxkv.cache.variants import dsa, gqa, place
from jaxkv.errors import CacheLeased, CachePoisoned
from torch_bridge import LeaseLeaked, lease
from torch_bridge.sharing import leases

pytestmark = pytest.mark.torch


@pytest.fixture
def owner():
    layout = group_layers(
        [
            *place([gqa(2, 16, dtype="float32", page_size=4)] * 2),
            LayerSpec(2, StateSpec("state", (ArraySpec("ssm", (8, 16), "float32"),))),
        ]
    )
    return CacheOwner(layout, {"gqa": 4, "state": 4})


@jax.jit(donate_argnums=0)
def add_one(cache):
    return Cache(arrays=tuple(a + 1 for a in cache.arrays), keys=cache.keys), cache.arrays[0].sum()


def pointers(owner):
    return [array.unsafe_buffer_pointer() for array in owner.handle().cache.arrays]


def test_views_are_the_buffers_themselves_by_name(owner):
    owner.run(add_one)
    before = pointers(owner)
    with lease(owner) as views:
        assert list(views) == [
            "layer0.key",
            "layer0.value",
            "layer1.key",
            "layer1.value",
            "layer2.ssm",
        ]
        assert [view.data_ptr() for view in views.values()] == before
        assert views["layer1.value"].shape == (4, 4, 2, 16)
        assert all(bool((view == 1).all()) for view in views.values())
        with pytest.raises(KeyError, match=r"no 'layer9\.key'; it has layer0\.key"):
            views["layer9.key"]
        views.commit()
    assert pointers(owner) == before


def test_a_commit_makes_writes_the_caches_value_in_place_and_grows_the_epoch(owner):
    before, epoch, old = pointers(owner), owner.epoch, owner.handle()
    printed = str(old.cache.arrays[0][0, 0, 0, 0])
    with lease(owner) as views:
        views["layer0.key"][1, 2] = 7.0
        views.commit()
    assert owner.epoch == epoch + 1
    assert pointers(owner) == before
    assert printed == "0.0"
    np.testing.assert_array_equal(
        owner.handle().cache.arrays[0][1, 2], np.full((2, 16), 7.0, np.float32)
    )
    assert float(owner.run(add_one)) == 7.0 * 32
    with pytest.raises(CachePoisoned, match="handle is of epoch"):
        old.cache


def test_handles_of_before_are_deleted_so_nothing_stale_is_read(owner):
    array = owner.handle().cache.arrays[0]
    with lease(owner) as views:
        views["layer0.key"].fill_(3.0)
        assert array.is_deleted()
        views.commit()
    with pytest.raises(RuntimeError, match="deleted"):
        array + 1


@pytest.mark.parametrize("use", ["run", "take", "handle", "lease"])
def test_any_use_while_leased_names_the_place_of_the_lease(owner, use):
    views = lease(owner)
    uses = {
        "run": lambda: owner.run(add_one),
        "take": owner.take,
        "handle": owner.handle,
        "lease": lambda: lease(owner),
    }
    with pytest.raises(CacheLeased, match=r"torch, at .*test_leases\.py:\d+"):
        uses[use]()
    views.commit()
    owner.run(add_one)


KEEPING = {
    "the view": lambda view: view,
    "a slice": lambda view: view[2:3, 0],
    "other bytes": lambda view: view.view(torch.int32),
    "numpy": lambda view: view.numpy(),
    "a saved tensor": lambda view: torch.ones(16, requires_grad=True) * view,
}


def test_a_handle_of_before_cannot_be_read_while_leased(owner):
    handle = owner.handle()
    with lease(owner) as views:
        with pytest.raises(CacheLeased):
            handle.cache
        views.commit()


@pytest.mark.parametrize("keep", KEEPING)
def test_whatever_torch_keeps_is_found_and_named(owner, keep):
    views = lease(owner)
    kept = KEEPING[keep](views["layer1.key"])
    with pytest.raises(LeaseLeaked, match=r"outlive the lease .*: layer1\.key\. Drop"):
        views.commit()
    with pytest.raises(CacheLeased):
        owner.run(add_one)
    del kept
    views.commit()
    owner.run(add_one)


def test_a_cycle_that_python_has_not_collected_is_no_leak(owner):
    with lease(owner) as views:
        ring = [views["layer0.key"]]
        ring.append(ring)
        del ring
        views.commit()


def test_a_numpy_view_of_before_blocks_the_lease_and_costs_nothing(owner):
    with lease(owner) as views:
        views["layer0.value"].fill_(2.0)
        views.commit()
    seen = np.asarray(owner.handle().cache.arrays[1])
    with pytest.raises(LeaseLeaked, match=r"of layer0\.value made outside of a lease"):
        lease(owner)
    assert float(owner.handle().cache.arrays[1].min()) == 2.0
    del seen
    gc.collect()
    with lease(owner) as views:
        views.commit()


def test_a_write_lease_that_ends_otherwise_poisons(owner):
    with pytest.raises(CachePoisoned, match="ended without commit"), lease(owner) as views:
        views["layer0.key"].zero_()
    assert owner.poisoned
    with pytest.raises(CachePoisoned, match="ended without commit"):
        owner.run(add_one)
    owner.rebuild()
    with pytest.raises(ZeroDivisionError), lease(owner):
        1 / 0
    with pytest.raises(CachePoisoned, match="ZeroDivisionError") as raised:
        lease(owner)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    owner.rebuild()
    lost = lease(owner)
    del lost
    with pytest.raises(CachePoisoned, match="dropped without commit"):
        owner.handle()


def test_a_lease_that_only_reads_ends_by_itself_and_notices_writes(owner):
    with lease(owner, write=False) as views:
        assert float(views["layer0.key"].sum()) == 0.0
    assert not owner.poisoned
    with (
        pytest.raises(CachePoisoned, match=r"wrote to layer1\.key through the lease"),
        lease(owner, write=False) as views,
    ):
        views["layer1.key"][0].add_(1.0)
    assert owner.poisoned


def test_an_error_inside_a_lease_that_only_reads_costs_nothing(owner):
    with lease(owner) as views:
        views["layer0.key"].fill_(2.0)
        views.commit()
    with pytest.raises(ZeroDivisionError), lease(owner, write=False):
        1 / 0
    dropped = lease(owner, write=False)
    del dropped
    assert float(owner.handle().cache.arrays[0].min()) == 2.0


def test_an_error_inside_a_lease_that_only_reads_hides_no_write_and_no_view(owner):
    views = lease(owner, write=False)
    kept = views["layer0.key"]
    with pytest.raises(ZeroDivisionError), views:
        1 / 0
    with pytest.raises(CacheLeased):
        owner.handle()
    del kept
    views.release()
    views = lease(owner, write=False)
    views["layer0.key"].zero_()
    with pytest.raises(ZeroDivisionError), views:
        1 / 0
    with pytest.raises(CachePoisoned, match="though it only reads"):
        owner.handle()


def test_views_are_gone_after_a_commit_that_failed(owner):
    views = lease(owner)
    kept = views["layer0.key"][0]
    with pytest.raises(LeaseLeaked):
        views.commit()
    with pytest.raises(ValueError, match="dropped its views when it was ended"):
        views["layer0.key"]
    del kept
    views.commit()


def test_writes_are_noticed_inside_inference_mode_too(owner):
    with (
        pytest.raises(CachePoisoned, match=r"wrote to layer0\.key"),
        torch.inference_mode(),
        lease(owner, write=False) as views,
    ):
        views["layer0.key"].zero_()


def test_the_wrong_end_of_a_lease_is_refused(owner):
    reads = lease(owner, write=False)
    with pytest.raises(ValueError, match="only reads"):
        reads.commit()
    reads.release()
    writes = lease(owner)
    with pytest.raises(ValueError, match="may have been written to"):
        writes.release()
    writes.commit()
    for after in (writes.commit, lambda: writes["layer0.key"], lambda: writes.array("layer0.key")):
        with pytest.raises(ValueError, match="has ended"):
            after()


def test_a_cache_replaced_while_leased_is_not_overwritten_by_the_lease(owner):
    views = lease(owner)
    views["layer0.key"].fill_(5.0)
    owner.rebuild()
    with pytest.raises(CachePoisoned, match="replaced or lost while it was leased"):
        views.commit()
    assert float(owner.handle().cache.arrays[0].max()) == 0.0


def test_an_old_lease_does_not_end_a_new_one(owner):
    old = lease(owner)
    owner.rebuild()
    new = lease(owner)
    with pytest.raises(CachePoisoned):
        old.commit()
    del old
    new.commit()
    assert not owner.poisoned


def test_programs_may_read_leased_buffers_after_what_they_are_given(owner):
    with lease(owner) as views:
        views["layer0.key"].fill_(2.0)
        token = leases.fence(torch.device("cpu"))
        total = jax.jit(lambda pages, token: pages.sum() + 0 * token[0])(
            views.array("layer0.key"), token
        )
        assert float(total) == 2.0 * 4 * 4 * 2 * 16
        views.commit()


def test_a_hundred_leases_move_no_buffer_and_allocate_no_other(owner):
    before = pointers(owner)
    live = len(jax.live_arrays())
    for _ in range(100):
        with lease(owner) as views:
            views["layer2.ssm"].add_(1.0)
            views.commit()
        owner.run(add_one)
    assert pointers(owner) == before
    assert float(owner.handle().cache.arrays[4].max()) == 200.0
    assert len(jax.live_arrays()) <= live + 4


def test_bytes_come_as_bytes():
    layout = group_layers(
        place(
            [
                gqa(1, 16, dtype="float32", page_size=4, quantised="fp8"),
                dsa(128, 8, 128, page_size=4),
            ]
        )
    )
    owner = CacheOwner(layout, {"gqa": 2, "dsa": 2})
    with lease(owner) as views:
        assert views["layer0.key"].dtype == views["layer1.key"].dtype == torch.uint8
        views["layer0.key"].view(torch.float8_e4m3fn)[0, 0] = torch.tensor(-1.5)
        views["layer1.indexer"][1, 3] = 200
        views.commit()
    arrays = owner.handle().cache.arrays
    assert float(arrays[0][0, 0, 0, 5].astype(jnp.float32)) == -1.5
    assert int(arrays[-1][1, 3, 0]) == 200

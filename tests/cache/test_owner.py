"""The owner of the live cache: which failed steps it survives, and the errors of a lost cache."""

import weakref
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import Cache
from jaxkv.cache.variants import gqa, place
from jaxkv.errors import CacheLeased, CachePoisoned
from pallas_kernels.peer_sum.api import Mailboxes, peers_shape
from tests.cache.layouts import counts_of, hybrid
from tests.devices import needs_devices

LAYOUT = hybrid()
COUNTS = counts_of(LAYOUT, 3)


def add(cache, amount):
    arrays = tuple(array + amount.astype(array.dtype) for array in cache.arrays)
    return Cache(arrays=arrays, keys=cache.keys), amount * 2


def burst(_):
    raise RuntimeError("the device burst")


def add_then_burst(cache, amount):
    """Fails at execution, when the donated buffers are gone already."""
    cache, doubled = add(cache, amount)
    return cache, io_callback(burst, jax.ShapeDtypeStruct((), jnp.int32), doubled, ordered=True)


donating_add = jax.jit(add, donate_argnums=0)
ONE = jnp.ones((), jnp.int32)


def is_full_of(cache, value):
    return all((np.asarray(array.astype(jnp.float32)) == value).all() for array in cache.arrays)


@pytest.fixture
def owner():
    return CacheOwner(LAYOUT, COUNTS)


def compiled_add(owner):
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), owner.handle().cache
    )
    return donating_add.lower(shapes, ONE).compile()


@pytest.mark.parametrize("form", ["jit", "compiled ahead of time"])
def test_a_step_donates_the_cache_and_its_successor_is_kept(owner, form):
    step = donating_add if form == "jit" else compiled_add(owner)
    before = owner.handle().cache.arrays
    pointers = [array.unsafe_buffer_pointer() for array in before]
    assert int(owner.run(step, ONE)) == 2
    assert all(array.is_deleted() for array in before)
    after = owner.handle().cache
    assert [array.unsafe_buffer_pointer() for array in after.arrays] == pointers
    assert is_full_of(after, 1)


def test_each_step_begins_an_epoch_and_old_handles_are_refused(owner):
    """Our error comes before JAX's own 'Array has been deleted'."""
    epoch = owner.epoch
    old = owner.handle()
    owner.run(donating_add, ONE)
    assert owner.epoch == epoch + 1
    message = f"handle is of epoch {epoch} but the cache is at epoch {epoch + 1}"
    with pytest.raises(CachePoisoned, match=message):
        old.cache
    assert is_full_of(owner.handle().cache, 1)


@pytest.mark.parametrize("use", ["run", "take"])
def test_an_observer_reads_the_cache_before_each_use_that_may_overwrite_it(owner, use):
    seen = []
    end = owner.before_donation(
        lambda: seen.append(int(jnp.copy(owner.handle().cache.arrays[0]).max()))
    )

    def add_one():
        if use == "run":
            owner.run(donating_add, ONE)
        else:
            owner.put(donating_add(owner.take(), ONE)[0])

    add_one()
    add_one()
    owner.handle()
    assert seen == [0, 1]
    end()
    end()
    add_one()
    assert seen == [0, 1]


def test_an_observer_that_fails_costs_nothing(owner):
    def fail():
        raise RuntimeError("the observer failed")

    end = owner.before_donation(fail)
    for use in (lambda: owner.run(donating_add, ONE), owner.take):
        with pytest.raises(RuntimeError, match="the observer failed"):
            use()
    end()
    assert is_full_of(owner.handle().cache, 0)
    owner.run(donating_add, ONE)
    assert is_full_of(owner.handle().cache, 1)


def test_a_step_that_fails_before_the_donation_leaves_the_cache(owner):
    """A bad argument is the caller's error and nothing is lost."""
    step = compiled_add(owner)
    handle = owner.handle()
    with pytest.raises(TypeError):
        owner.run(step, jnp.ones((2,), jnp.float32))
    assert not owner.poisoned
    assert is_full_of(handle.cache, 0)
    owner.run(step, ONE)


@pytest.mark.filterwarnings("ignore")  # JAX logs the callback's error itself
def test_a_step_that_fails_after_the_donation_poisons_the_cache(owner):
    """The error is raised, the next use names the remedy, and `rebuild` recovers."""
    owner.run(donating_add, ONE)
    burst_step = jax.jit(add_then_burst, donate_argnums=0)

    def step(cache, amount):  # a GPU tells of it only when asked for the result
        return jax.block_until_ready(burst_step(cache, amount))

    message = r"failed after donating it: .*the device burst"
    with pytest.raises(CachePoisoned, match=message) as caught:
        owner.run(step, ONE)
    assert "the device burst" in str(caught.value.__cause__)
    assert owner.poisoned
    for use in (lambda: owner.run(donating_add, ONE), owner.handle, owner.take):
        with pytest.raises(CachePoisoned, match=r"Call rebuild\(\) for an empty one"):
            use()
    owner.rebuild()
    assert is_full_of(owner.handle().cache, 0)
    assert int(owner.run(donating_add, ONE)) == 2


def test_python_that_fails_after_the_device_step_poisons_the_cache(owner):
    def step(cache, amount):
        donating_add(cache, amount)
        raise KeyError("bookkeeping")

    with pytest.raises(CachePoisoned, match="KeyError") as caught:
        owner.run(step, ONE)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_interrupt_stays_an_interrupt(owner):
    def step(cache, amount):
        donating_add(cache, amount)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        owner.run(step, ONE)
    assert owner.poisoned


def test_one_deleted_leaf_is_enough_to_lose_the_cache(owner):
    def step(cache, amount):
        cache.arrays[1].delete()
        raise ValueError("half gone")

    with pytest.raises(CachePoisoned, match="half gone"):
        owner.run(step, ONE)


def test_a_failure_learned_at_the_host_read_poisons_the_cache(owner):
    """An asynchronous failure shows only when the results are read."""
    cause = RuntimeError("RESOURCE_EXHAUSTED")
    handle = owner.handle()
    owner.poison("the step's tokens could not be read", cause=cause)
    with pytest.raises(CachePoisoned, match="the step's tokens could not be read") as caught:
        handle.cache
    assert caught.value.__cause__ is cause


def test_a_handle_does_not_survive_a_rebuild(owner):
    old = owner.handle()
    owner.rebuild()
    with pytest.raises(CachePoisoned, match="handle is of epoch"):
        old.cache


def test_what_is_taken_must_be_put_back(owner):
    cache = owner.take()
    with pytest.raises(CachePoisoned, match="taken and not put back"):
        owner.run(donating_add, ONE)
    owner.put(cache)
    owner.run(donating_add, ONE)


def test_put_accepts_only_the_successor_of_what_was_taken(owner):
    """A cache in another order would be paired wrongly by the next donation."""
    with pytest.raises(ValueError, match="without take"):
        owner.put(owner.handle().cache)
    cache = owner.take()
    reversed_cache = Cache(arrays=cache.arrays[::-1], keys=cache.keys[::-1])
    with pytest.raises(ValueError, match="the step returned the arrays"):
        owner.put(reversed_cache)
    owner.put(cache)
    owner.poison("lost")
    with pytest.raises(ValueError, match="or it was lost"):
        owner.put(cache)


def test_steps_are_traced_once_across_epochs_and_rebuilds(owner):
    """Executables remain valid when the cache is rebuilt."""
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(add, n=1), donate_argnums=0)
    for _ in range(3):
        owner.run(step, ONE)
    owner.rebuild()
    owner.run(step, ONE)
    assert is_full_of(owner.handle().cache, 1)


def test_compiling_leaves_the_cache_as_it_is(owner):
    """Programs are compiled from shapes, so nothing runs."""
    owner.run(donating_add, ONE)
    before = jax.tree.map(np.asarray, owner.handle().cache)
    pointers = [array.unsafe_buffer_pointer() for array in owner.handle().cache.arrays]
    compiled_add(owner)
    chex.assert_trees_all_equal(owner.handle().cache, before)
    assert [a.unsafe_buffer_pointer() for a in owner.handle().cache.arrays] == pointers


def test_a_rebuild_without_memory_leaves_the_owner_poisoned_and_a_later_one_heals_it(
    owner, monkeypatch
):
    """Out of memory is likeliest while rebuilding after an out-of-memory."""

    def exhausted(*args, **options):
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("jaxkv.cache.owner.init_cache", exhausted)
        with pytest.raises(MemoryError):
            owner.rebuild()
    assert owner.poisoned
    with pytest.raises(CachePoisoned, match="no memory"):
        owner.take()
    owner.rebuild()
    assert not owner.poisoned
    assert is_full_of(owner.handle().cache, 0)


def test_a_successor_of_other_sizes_is_refused(owner):
    def shrink(cache, amount):
        arrays = tuple(array[:2] for array in cache.arrays)
        return Cache(arrays=arrays, keys=cache.keys), amount

    with pytest.raises(ValueError, match="returned the arrays"):
        owner.run(shrink, ONE)
    assert is_full_of(owner.handle().cache, 0)


def test_a_successor_of_another_dtype_is_refused_after_good_ones(owner):
    """A successor that was accepted once is recognised without a look at each array; another one is not."""

    def widen(cache, amount):
        changed = tuple(array.astype(jnp.float32) for array in cache.arrays)
        return Cache(arrays=changed, keys=cache.keys), amount

    def rename(cache, amount):
        keys = tuple((layer + 1, role) for layer, role in cache.keys)
        return Cache(arrays=cache.arrays, keys=keys), amount

    for _ in range(2):
        owner.run(donating_add, ONE)
    for other in (widen, rename):
        with pytest.raises(ValueError, match="returned the arrays"):
            owner.run(other, ONE)
    owner.run(donating_add, ONE)
    assert is_full_of(owner.handle().cache, 3)


def test_a_borrower_that_lends_until_asked_is_asked_once_and_first(owner):
    cache, asked = owner.take(borrower="a friend"), []

    def give_back():
        asked.append(owner.borrower)
        owner.put(cache)

    owner.lend_until_asked(give_back)
    assert not owner.borrower
    assert is_full_of(owner.handle().cache, 0)
    assert owner.run(donating_add, ONE) == 2
    assert asked == ["a friend"]


def test_a_borrower_that_goes_on_is_not_asked(owner):
    cache = owner.take(borrower="a friend")
    owner.lend_until_asked(lambda: owner.put(cache))
    owner.lend_until_asked(None)
    with pytest.raises(CacheLeased, match="leased to a friend"):
        owner.handle()


def test_a_lost_cache_is_asked_for_too_so_that_its_memory_goes(owner):
    owner.take(borrower="a friend")
    asked = []
    owner.lend_until_asked(lambda: asked.append(owner.poisoned))
    owner.poison("the device is broken")
    assert asked == [True]


@pytest.fixture
def made(monkeypatch):
    """Lets the host's devices have mailboxes; returns weak references to those that were made."""
    made = []

    def make(mesh):
        place = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
        peers = jnp.full(peers_shape(mesh.size), len(made), jnp.int32, device=place)
        mailboxes = Mailboxes(jnp.zeros((mesh.size, 8), jnp.int32, device=place), peers)
        made.append(weakref.ref(mailboxes))
        return mailboxes

    monkeypatch.setattr("jaxkv.cache.owner.make_mailboxes", make)
    return made


def over_two(*, mailboxes=True):
    layout = group_layers(place([gqa(2, 4, dtype="float32", page_size=4)]))
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("tensor",))
    return CacheOwner(layout, counts_of(layout, 3), device=mesh, mailboxes=mailboxes)


@needs_devices(2)
def test_a_cache_over_gpus_has_mailboxes_and_a_rebuilt_one_has_new_ones(made):
    """Some devices may have counted sums of a failed step."""
    owner = over_two()
    owner.run(jax.jit(lambda cache: (cache, ()), donate_argnums=0))
    assert (np.asarray(owner.handle().cache.peers) == 0).all()
    owner.poison("lost")
    owner.rebuild()
    assert len(made) == 2
    assert (np.asarray(owner.handle().cache.peers) == 1).all()
    assert [one() is None for one in made] == [True, False]
    owner.close()
    assert made[1]() is None
    owner.rebuild()
    assert (np.asarray(owner.handle().cache.peers) == 2).all()


@needs_devices(2)
def test_a_successor_without_peers_is_refused(made):
    owner = over_two()
    cache = owner.take()
    with pytest.raises(ValueError, match="without its `peers`"):
        owner.put(replace(cache, peers=None))
    owner.put(cache)


@needs_devices(2)
def test_devices_without_mailboxes_have_no_peers(made):
    assert over_two(mailboxes=False).handle().cache.peers is None
    assert made == []

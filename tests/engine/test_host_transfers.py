"""Bytes on their way between a cache and the host: S4-16, S4-17, S4-19, S4-20, T-21, T-37."""

import gc
import hashlib
import logging
import weakref

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxkv.cache.host_entry import Move
from jaxkv.cache.host_swap import SwapIn
from jaxkv.cache.host_tier import HostTier
from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.prefix_keys import page_key
from jaxkv.cache.prefix_tree import Node
from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import Cache
from jaxkv.cache.variants import gqa, place, sampling
from jaxkv.engine import host_memory, host_transfers
from jaxkv.engine.executor import key_of
from jaxkv.engine.host_memory import HostMemory
from jaxkv.engine.host_programs import BUCKETS, declare_swaps, pad_ids, swap_lowering, unit_shapes
from jaxkv.engine.host_transfers import HostTransfers, Transfer
from jaxkv.engine.programs import Programs
from tests.cache.layouts import counts_of, every_variant

ALL = every_variant()
PAGED = group_layers(place([gqa(2, 4, dtype="bfloat16", page_size=4)] * 2 + [sampling(5)]))
_PROGRAMS = {}


class Device:
    """A cache full of random bytes, and the part of an executor that moves them."""

    def __init__(self, layout, count, seed=0):
        self.layout = layout
        self.owner = CacheOwner(layout, counts_of(layout, count))
        self.programs = _PROGRAMS.setdefault((repr(layout), count), Programs())
        self.before_update = None
        self.scramble(seed)

    def scramble(self, seed):
        draw = np.random.default_rng(seed)
        cache = self.owner.take()
        arrays = [
            jnp.array(draw.integers(0, 256, array.nbytes, np.uint8).view(array.dtype)).reshape(
                array.shape
            )
            for array in cache.arrays
        ]
        self.owner.put(Cache(arrays=tuple(arrays), keys=cache.keys))

    def program(self, declared):
        cache, counts = self.owner.handle().cache, self.owner.counts
        return self.programs.get(
            key_of(self.layout, declared),
            lambda: swap_lowering(self.layout, counts, declared, cache),
        )

    def look(self, declared, *arrays):
        return self.program(declared)(self.owner.handle().cache, *arrays)

    def update(self, declared, *arguments):
        program = self.program(declared)
        if self.before_update is not None:
            self.before_update()
        return self.owner.run(lambda cache: program(cache, *arguments))

    def unit(self, name, unit):
        return self.units(name)[unit]

    def units(self, name):
        """Returns a digest of each page or state, over all its arrays in the cache's order."""
        group, cache = self.layout.group(name), self.owner.handle().cache
        arrays = [
            # A copy: NumPy's view of the array itself could not be donated.
            np.array(jnp.copy(array))
            for key, array in zip(cache.keys, cache.arrays, strict=True)
            if key in {(layer, one.role) for layer in group.layers for one in group.spec.arrays}
        ]
        return [
            hashlib.md5(b"".join(array[at].tobytes() for array in arrays)).hexdigest()
            for at in range(self.owner.counts[name])
        ]


class Host:
    """A tier, and transfers between it and a device."""

    def __init__(self, device, num_bytes=2**24):
        self.device = device
        self.tier = HostTier(device.layout, num_bytes, page_size=4)
        self.transfers = HostTransfers(device, self.tier, HostMemory(jax.devices()[0]))
        device.before_update = self.transfers.flush

    def leave(self, name, ids):
        """Lets pages go; returns their handles."""
        handles = []
        for at in ids:
            key = page_key(b"nobody", at.to_bytes(4, "little"))
            assert self.tier.offer_page(name, Node(key, at, 0, 0))
            handles.append(self.tier.find(name, key).page)
        return handles

    def back(self, moves):
        """Brings pages back; returns whether all came."""
        inbound = self.transfers.begin(SwapIn(-1, 1, 1, moves=moves))
        done = False
        while done is False:
            done = self.transfers.advance(inbound, wait=True)
        return bool(done)


def test_every_array_of_every_variant_comes_back_bit_for_bit():
    # S4-16: shuffled ids, other places, and nothing else is touched.
    device = Device(ALL, 9)
    host = Host(device)
    draw, before, moves = np.random.default_rng(1), {}, []
    for group in (*ALL.paged_groups, *ALL.state_groups):
        ids = draw.permutation(np.arange(1, 9))[:4].tolist()
        before[group.name] = device.units(group.name), ids
        targets = draw.permutation(np.arange(1, 9))[:4].tolist()
        handles = host.leave(group.name, ids)
        moves += [Move(group.name, *pair) for pair in zip(targets, handles, strict=True)]
    host.transfers.flush()
    device.scramble(2)
    after = {name: device.units(name) for name in before}
    assert host.back(moves)
    for name, (units, ids) in before.items():
        mine = [move for move in moves if move.group == name]
        for source, move in zip(ids, mine, strict=True):
            after[name][move.unit] = units[source]
        assert device.units(name) == after[name]
    counts = host.tier.counts
    assert (counts.written, counts.read) == (len(moves), len(moves))
    assert counts.written_bytes == counts.read_bytes == host.tier.used
    assert host.tier.used == sum(ALL.group(move.group).bytes_per_unit for move in moves)


@pytest.mark.slow
def test_64_layers_of_256_pages_come_back_bit_for_bit():
    # S4-16, FastDeploy's own case.
    layout = group_layers(place([gqa(1, 8, dtype="bfloat16", page_size=8)] * 64 + [sampling(5)]))
    device = Device(layout, 256)
    host = Host(device)
    ids, targets = (np.random.default_rng(seed).permutation(256).tolist() for seed in (3, 4))
    before = device.units("gqa")
    handles = host.leave("gqa", ids)
    host.transfers.flush()
    device.scramble(5)
    pairs = zip(targets, handles, strict=True)
    assert host.back([Move("gqa", target, handle) for target, handle in pairs])
    after = device.units("gqa")
    assert [after[target] for target in targets] == [before[source] for source in ids]


def test_host_and_device_have_the_same_arrays_in_the_same_order():
    # S4-16, T-21: one list of specs for both.
    for group in ALL.groups:
        named = [array for array in ALL.arrays(counts_of(ALL, 2)) if array.group == group.name]
        shapes = unit_shapes(group)
        first = [array for array in named if array.layer == group.layers[0]]
        assert [array.dtype for array in first] == [one.dtype.name for one in shapes]
        assert [array.shape[1:] for array in first] == [one.shape[1:] for one in shapes]
        assert all(one.shape[0] == len(group.layers) for one in shapes)
        assert sum(one.size * one.dtype.itemsize for one in shapes) == group.bytes_per_unit


def test_each_group_and_bucket_has_its_programs():
    wanted = 2 * len(BUCKETS) * len((*ALL.paged_groups, *ALL.state_groups))
    keys = {key_of(ALL, declared) for declared in declare_swaps(ALL)}
    assert len(keys) == len(declare_swaps(ALL)) == wanted


def test_memory_is_pinned_where_the_device_offers_it():
    device = jax.devices()[0]
    host = Host(Device(PAGED, 6))
    assert host.transfers.memory.kind == "pinned_host"
    (handle,) = host.leave("gqa", [1])
    host.transfers.flush()
    stored = host.transfers._stored[handle]
    assert {array.sharding.memory_kind for array in stored} == {"pinned_host"}
    assert not host_memory._why_not_pinned(device)


def test_without_pinned_memory_copies_go_through_numpy_with_one_warning(monkeypatch, caplog):
    # S4-17, T-37.
    monkeypatch.setattr(host_memory, "_why_not_pinned", lambda device: "it is Tuesday")
    with caplog.at_level(logging.WARNING):
        device = Device(PAGED, 6)
        host = Host(device)
        before = device.units("gqa")
        handles = host.leave("gqa", [1, 3])
        for _ in range(3):
            host.transfers.flush()
            device.scramble(9)
        host.transfers.lose_device()
        assert host.back([Move("gqa", 0, handles[1]), Move("gqa", 5, handles[0])])
    assert (device.unit("gqa", 0), device.unit("gqa", 5)) == (before[3], before[1])
    assert host.transfers.memory.kind == "pageable"
    assert all(
        isinstance(array, np.ndarray) and array.base is None
        for stored in host.transfers._stored.values()
        for array in stored
    )
    said = [record.message for record in caplog.records]
    assert said == ["prefixes on the host are copied through pageable memory: it is Tuesday"]


def test_a_device_without_pinned_memory_says_so(monkeypatch):
    # None of these is a device of JAX's.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

    class Memory:
        kind = "device"

    class Bare:
        def addressable_memories(self):
            return [Memory()]

        def __str__(self):
            return "bare"

    class Odd(Bare):
        def addressable_memories(self):
            return [type("M", (), {"kind": kind})() for kind in ("device", "pinned_host")]

    told = host_memory._why_not_pinned(Bare())
    assert told == "bare offers the memories device, and not pinned_host"
    assert "a copy to pinned_host and back failed on bare" in host_memory._why_not_pinned(Odd())


def test_a_place_is_read_before_anything_is_written_there():
    # S4-20: the read of what left is enqueued first, though a program writes the same page at once.
    device = Device(PAGED, 6)
    host = Host(device)
    before = device.units("gqa")
    (old,) = host.leave("gqa", [2])
    host.transfers.flush()
    (new,) = host.leave("gqa", [3])
    assert host.back([Move("gqa", 3, old)])
    assert device.unit("gqa", 3) == before[2]
    assert host.back([Move("gqa", 4, new)])
    assert device.unit("gqa", 4) == before[3]


def test_nothing_and_mixtures_are_no_transfers():
    # S4-20: an empty set of ids is refused.
    with pytest.raises(ValueError, match=r"one group, at least one; got \[\]"):
        Transfer(True, (), 0)
    with pytest.raises(ValueError, match="of one group"):
        Transfer(True, (Move("a", 0, 0), Move("b", 0, 1)), 2)
    with pytest.raises(ValueError, match="up to 4 pages or states cannot move 0"):
        pad_ids([], 4, 9)
    with pytest.raises(ValueError, match="cannot move 5"):
        pad_ids([0] * 5, 4, 9)


def test_each_transfer_has_its_own_counters_and_its_own_failure(monkeypatch):
    # S4-20: the failure is on the transfer that failed, and costs nobody else.
    device = Device(PAGED, 24)
    host = Host(device)
    send, calls = HostMemory.send, []

    def fails_second(memory, units):
        calls.append(len(units))
        if len(calls) == 2:
            raise RuntimeError("no more pinned memory")
        return send(memory, units)

    monkeypatch.setattr(HostMemory, "send", fails_second)
    before = device.units("gqa")
    handles = host.leave("gqa", range(20))
    host.leave("gqa", [23])
    host.transfers.flush()
    host.transfers.lose_device()
    one, two = host.transfers.transfers
    assert (len(one.moves), len(two.moves)) == (16, 5)
    assert (one.done, one.error, two.done) == (True, None, False)
    assert str(two.error) == "no more pinned memory"
    assert one.num_bytes == 16 * PAGED.group("gqa").bytes_per_unit
    counts = host.tier.counts
    assert (counts.written, counts.failures, len(host.tier)) == (16, 1, 16)
    assert host.back([Move("gqa", 22, handles[15])])
    assert device.unit("gqa", 22) == before[15]
    # What was lost is missed, and not made up.
    assert not host.back([Move("gqa", 21, handles[16])])
    assert device.unit("gqa", 21) == before[21]


def test_where_memory_ends_before_the_budget_the_tier_grows_no_more(monkeypatch):
    device = Device(PAGED, 24)
    host = Host(device)
    send, calls = HostMemory.send, []

    def ends(memory, units):
        calls.append(len(units))
        if len(calls) > 1 and host.tier.used > 16 * PAGED.group("gqa").bytes_per_unit:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of host memory")
        return send(memory, units)

    monkeypatch.setattr(HostMemory, "send", ends)
    host.leave("gqa", range(16))
    host.transfers.flush()
    host.leave("gqa", [16])
    host.transfers.flush()
    stats = host.tier.stats
    assert (stats.entries, stats.failures) == (16, 1)
    assert stats.limit_bytes == stats.used_bytes == 16 * PAGED.group("gqa").bytes_per_unit
    # Nothing is wrong with it: what leaves now takes the place of the longest unused.
    for at in range(17, 22):
        host.leave("gqa", [at])
        host.transfers.flush()
    assert host.transfers.why_hopeless() == ""
    assert (host.tier.stats.evictions, host.tier.stats.failures) == (5, 1)


def test_a_step_that_ran_out_of_memory_with_its_cache_does_not_shrink_the_tier(monkeypatch):
    """Reliability row 2: what was read out of a lost cache tells the step's error, and the host has room as before."""
    host = Host(Device(PAGED, 24))
    room = host.tier.limit
    host.leave("gqa", range(4))
    host.transfers.flush()
    host.transfers.lose_device()

    def lost(memory, units):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: the step needed more than there is")

    with monkeypatch.context() as patched:
        patched.setattr(HostMemory, "settle", lost)
        host.leave("gqa", range(4, 24))
        host.transfers.flush()
        host.transfers.lose_device()
    assert (host.tier.stats.entries, host.tier.stats.failures) == (4, 2)
    assert host.tier.limit == room
    host.leave("gqa", range(4, 24))
    host.transfers.flush()
    host.transfers.lose_device()
    assert len(host.tier) == 24
    host.tier.check()


def test_little_is_staged_at_a_time(monkeypatch):
    each = PAGED.group("gqa").bytes_per_unit
    monkeypatch.setattr(host_transfers, "STAGED_BYTES", 4 * each)
    device = Device(PAGED, 24)
    host = Host(device)
    before = device.units("gqa")
    handles = host.leave("gqa", range(12))
    host.transfers.flush()
    assert {len(one.moves) for one in host.transfers.transfers} == {2}
    moves = [Move("gqa", 12 + at, handle) for at, handle in enumerate(handles)]
    inbound = host.transfers.begin(SwapIn(-1, 1, 1, moves=moves))
    assert sum(one.num_bytes for one in inbound.staged) == 4 * each
    while host.transfers.advance(inbound, wait=True) is False:
        assert sum(one.num_bytes for one in inbound.staged) <= 4 * each
    assert device.units("gqa")[12:] == before[:12]


def test_memory_of_what_is_forgotten_is_given_back():
    host = Host(Device(PAGED, 6))
    handles = host.leave("gqa", [1, 2])
    host.transfers.flush()
    host.transfers.lose_device()
    watched = weakref.ref(host.transfers._stored[handles[0]][0])
    host.tier.discard(handles[:1])
    host.transfers.flush()
    gc.collect()
    assert watched() is None
    assert set(host.transfers._stored) == {handles[1]}


def test_closing_frees_everything_goes_on_past_a_failure_and_may_be_repeated(monkeypatch):
    # S4-19.
    host = Host(Device(PAGED, 6))
    host.leave("gqa", [1, 2, 3])
    host.transfers.flush()
    host.transfers.lose_device()
    arrays = [array for stored in host.transfers._stored.values() for array in stored]
    kind, delete, calls = type(arrays[0]), type(arrays[0]).delete, []

    def fails_first(array):
        calls.append(array)
        if len(calls) == 1:
            raise RuntimeError("busy")
        delete(array)

    monkeypatch.setattr(kind, "delete", fails_first)
    assert [str(error) for error in host.transfers.close()] == ["busy"]
    assert len(calls) == len(arrays)
    assert [array.is_deleted() for array in arrays] == [False] + [True] * (len(arrays) - 1)
    assert (len(host.tier), host.tier.used) == (0, 0)
    assert host.transfers.close() == ()


def test_nothing_refers_to_memory_that_was_freed():
    # S4-19.
    host = Host(Device(PAGED, 6))
    host.leave("gqa", [1, 2])
    host.transfers.flush()
    watched = [weakref.ref(array) for unit in host.transfers._stored.values() for array in unit]
    assert len(watched) == 4
    assert host.transfers.close() == ()
    gc.collect()
    assert not any(one() is not None for one in watched)

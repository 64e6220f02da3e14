"""Host memory, pinned or not: how it is allocated, how many bytes it takes, and that it is freed."""

import gc
import logging
import threading
import weakref

import jax
import jaxtyping
import numpy as np

from jaxkv.offload import memory as host_memory
from jaxkv.offload import transfers as host_transfers
from jaxkv.offload.entries import Move
from jaxkv.offload.memory import HostMemory
from jaxkv.offload.swap_in import SwapIn
from tests.engine.host_device import PAGED, Device, Host


def test_memory_is_pinned_where_the_device_offers_it():
    device = jax.devices()[0]
    host = Host(Device(PAGED, 6))
    assert host.transfers.memory.kind == "pinned_host"
    (handle,) = host.leave("gqa", [1])
    host.transfers.flush()
    stored = host.transfers._stored[handle]
    assert {array.sharding.memory_kind for array in stored} == {"pinned_host"}
    assert not host_memory._why_pageable(device)


def test_pinned_memory_is_reserved_by_arrays_that_are_freed(monkeypatch, caplog):
    """In pieces, so that the end of the engine ends it; a failure leaves the rest to the copies."""
    given, watched, put = [], [], jax.device_put
    ended = threading.Event()

    def device_put(array, place):
        if ended_after and len(given) + 1 == ended_after:
            ended.set()
        made = put(array, place)
        given.append((made.nbytes, made.sharding.memory_kind))
        watched.append(weakref.ref(made))
        return made

    memory = HostMemory(jax.devices()[0])
    monkeypatch.setattr(host_memory, "_RESERVED", 4096)
    monkeypatch.setattr(jax, "device_put", device_put)
    ended_after = 0
    memory.reserve(10_000, ended)
    assert given == [(size, "pinned_host") for size in (4096, 4096, 1808)]
    assert not any(one() is not None for one in watched)
    given.clear()
    ended_after = 2
    memory.reserve(10_000, ended)
    assert len(given) == 2
    ended.clear()
    given.clear()

    def refuse(array, place):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    monkeypatch.setattr(jax, "device_put", refuse)
    memory.reserve(10_000, ended)
    assert "of 10000 bytes of pinned memory 10000 are not reserved" in caplog.text
    memory.kind = "pageable"
    caplog.clear()
    memory.reserve(10_000, ended)
    assert not caplog.text


def test_without_pinned_memory_copies_go_through_numpy_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "_why_pageable", lambda device: "it is Tuesday")
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

    told = host_memory._why_pageable(Bare())
    assert told == "bare has the memory kinds device, but not pinned_host"
    assert "a copy to pinned_host and back failed on bare" in host_memory._why_pageable(Odd())


def test_where_memory_ends_before_the_budget_the_tier_grows_no_more(monkeypatch):
    device = Device(PAGED, 24)
    host = Host(device)
    send, calls = HostMemory.copy_to_host, []

    def ends(memory, units):
        calls.append(len(units))
        if len(calls) > 1 and host.tier.used > 16 * PAGED.group("gqa").bytes_per_unit:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of host memory")
        return send(memory, units)

    monkeypatch.setattr(HostMemory, "copy_to_host", ends)
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
    """A read from a lost cache raises the step's error, and the host has room as before."""
    host = Host(Device(PAGED, 24))
    room = host.tier.limit
    host.leave("gqa", range(4))
    host.transfers.flush()
    host.transfers.lose_device()

    def lost(memory, units):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: the step needed more than there is")

    with monkeypatch.context() as patched:
        patched.setattr(HostMemory, "wait_for_copies", lost)
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
    inbound = host.transfers.start(SwapIn(-1, 1, 1, moves=moves))
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
    host = Host(Device(PAGED, 6))
    host.leave("gqa", [1, 2])
    host.transfers.flush()
    watched = [weakref.ref(array) for unit in host.transfers._stored.values() for array in unit]
    assert len(watched) == 2
    assert host.transfers.close() == ()
    gc.collect()
    assert not any(one() is not None for one in watched)

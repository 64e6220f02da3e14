"""Transfers of pages and states between the cache and the host."""

from dataclasses import replace

import numpy as np
import pytest

from jaxkv.cache.spec import ArraySpec, PagedSpec, group_layers
from jaxkv.cache.variants import gqa, place, sampling
from jaxkv.models.tensor_parallel import tensor_mesh
from jaxkv.offload.entries import Move
from jaxkv.offload.memory import HostMemory
from jaxkv.offload.programs import (
    BUCKETS,
    SwapSpec,
    declare_swaps,
    pad_ids,
    role_stacks,
    unit_shapes,
)
from jaxkv.offload.transfers import Transfer
from tests.cache.layouts import DELTA, HALF, MAMBA2, counts_of
from tests.devices import needs_devices
from tests.engine.host_device import ALL, PAGED, Device, Host

_PARTS = gqa(2, 8, **HALF), gqa(2, 8, quantised="fp8", **HALF), MAMBA2, DELTA
DIVIDED = group_layers(
    place([replace(one, arrays=tuple(a.joined(2) for a in one.arrays)) for one in _PARTS])
)


@pytest.mark.parametrize(
    ("layout", "devices"),
    [(ALL, None), pytest.param(DIVIDED, 2, marks=needs_devices(2))],
    ids=["every variant", "divided"],
)
def test_every_array_comes_back_bit_for_bit(layout, devices):
    # The ids are shuffled, the targets are other places, and nothing else is written.
    device = Device(layout, 9, mesh=devices and tensor_mesh(devices))
    host = Host(device)
    draw, before, moves = np.random.default_rng(1), {}, []
    for group in (*layout.paged_groups, *layout.state_groups):
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
    assert host.tier.used == sum(layout.group(move.group).bytes_per_unit for move in moves)


def test_roles_that_differ_in_nothing_else_move_as_one_array():
    device = Device(ALL, 9)
    host = Host(device)
    found = {}
    for group in (*ALL.paged_groups, *ALL.state_groups):
        [handle] = host.leave(group.name, [1])
        host.transfers.flush()
        stored = host.transfers._stored[handle]
        assert [one.shape for one in stored] == [one.shape for one in unit_shapes(group)]
        found[group.name] = [[array.role for array in stack] for stack in role_stacks(group)]
        assert [len(one) for one in stored] == [len(stack) for stack in found[group.name]]
    assert found == {
        "gqa": [["key", "value"]],
        "gqa-2": [["key", "value"], ["key_scale", "value_scale"]],
        "window": [["key", "value"]],
        "mla": [["key"]],
        "dsa": [["key"], ["indexer"]],
        "mamba2": [["conv"], ["ssm"]],
        "delta": [["conv"], ["delta"]],
    }


@pytest.mark.parametrize(
    "other", [{"shape": (2, 4)}, {"dtype": "uint8"}, {"split": None}, {"devices": 2}]
)
def test_roles_that_differ_in_more_stay_apart(other):
    key = ArraySpec("key", (4, 2), "int8", split=0)
    value = replace(key, role="value")
    for arrays, lengths in (((key, value), [2]), ((key, replace(value, **other)), [1, 1])):
        [group] = group_layers(place([PagedSpec("odd", arrays, page_size=4)])).groups
        assert [len(stack) for stack in role_stacks(group)] == lengths


@needs_devices(2)
def test_of_a_divided_unit_each_device_moves_its_part_alone():
    device = Device(DIVIDED, 9, mesh=tensor_mesh(2))
    host = Host(device)
    for group in (*DIVIDED.paged_groups, *DIVIDED.state_groups):
        [handle] = host.leave(group.name, [1])
        host.transfers.flush()
        for array in host.transfers._stored[handle]:
            assert [2 * part.data.nbytes for part in array.addressable_shards] == [array.nbytes] * 2
        for out in (True, False):
            text = device.program(SwapSpec(out, group.index, BUCKETS[0])).compiled.as_text()
            for sent in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
                assert sent not in text


@pytest.mark.slow
def test_64_layers_of_256_pages_come_back_bit_for_bit():
    # This is FastDeploy's own case.
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
    # Device and host have one list of specs.
    for group in ALL.groups:
        named = [array for array in ALL.arrays(counts_of(ALL, 2)) if array.group == group.name]
        shapes = unit_shapes(group)
        first = [array for array in named if array.layer == group.layers[0]]
        by_role = [one for one in shapes for _ in range(one.shape[0])]
        assert [array.role for array in first] == [
            array.role for stack in role_stacks(group) for array in stack
        ]
        assert [array.dtype for array in first] == [one.dtype.name for one in by_role]
        assert [array.shape[1:] for array in first] == [one.shape[2:] for one in by_role]
        assert all(one.shape[1] == len(group.layers) for one in shapes)
        assert sum(one.size * one.dtype.itemsize for one in shapes) == group.bytes_per_unit


def test_each_group_and_bucket_has_its_programs():
    wanted = 2 * len(BUCKETS) * len((*ALL.paged_groups, *ALL.state_groups))
    assert len(set(declare_swaps(ALL))) == len(declare_swaps(ALL)) == wanted


def test_a_place_is_read_before_anything_is_written_there():
    # The read of an evicted page is enqueued before a program that writes the page at once.
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
    # An empty set of ids is refused.
    with pytest.raises(ValueError, match=r"one page or state, all of one group; got \[\]"):
        Transfer(True, (), 0)
    with pytest.raises(ValueError, match="of one group"):
        Transfer(True, (Move("a", 0, 0), Move("b", 0, 1)), 2)
    with pytest.raises(ValueError, match="up to 4 pages or states cannot move 0"):
        pad_ids([], 4, 9)
    with pytest.raises(ValueError, match="cannot move 5"):
        pad_ids([0] * 5, 4, 9)


def test_each_transfer_has_its_own_counters_and_its_own_failure(monkeypatch):
    # The failure is recorded on its own transfer, and the others succeed.
    device = Device(PAGED, 24)
    host = Host(device)
    send, calls = HostMemory.copy_to_host, []

    def fails_second(memory, units):
        calls.append(len(units))
        if len(calls) == 2:
            raise RuntimeError("no more pinned memory")
        return send(memory, units)

    monkeypatch.setattr(HostMemory, "copy_to_host", fails_second)
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

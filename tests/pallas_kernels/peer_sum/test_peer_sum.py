"""`peer_sum` without GPUs: which arrays and devices it refuses, and the sizes of its launches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from pallas_kernels.peer_sum import mosaic_gpu
from pallas_kernels.peer_sum.api import (
    MOST_BYTES,
    mailbox_bytes,
    make_mailboxes,
    peer_sum,
    peer_sum_weighed,
    why_not,
    why_not_mailboxes,
)
from pallas_kernels.peer_sum.mailboxes import BLOCKS
from pallas_kernels.peer_sum.mosaic_gpu import Geometry
from tests.devices import needs_devices


def typed(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("part", "weighs", "reason"),
    [
        (typed(4, 256, dtype="int32"), False, "sums bfloat16, float16, float32, got int32"),
        (typed(MOST_BYTES // 4 + 1, 4), False, "sums up to 4194304 bytes, got 8388616"),
        (typed(0, 256), False, "got 0"),
        (typed(1, 6), False, "sums multiples of 8 bytes, got 12"),
        (typed(2, 1028), True, "weighs rows of a multiple of 128 numbers, got 1028"),
        (typed(2, 96, dtype="float32"), True, "weighs rows of a multiple of 64 numbers, got 96"),
        (typed(2, 1028), False, None),
        (typed(64, 8192), True, None),
        (typed(MOST_BYTES // 4096, 1024, dtype="float32"), True, None),
    ],
)
def test_refusals_say_what_was_got_and_what_is_supported(part, weighs, reason):
    refusal = mosaic_gpu.refusal(part, weighs=weighs)
    assert refusal is None if reason is None else reason in (refusal or "")


def test_no_device_but_a_gpu_runs_it():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    assert "sm90" in (why_not(typed(1, 4096)) or "")
    part, peers = jnp.zeros((1, 4096), jnp.bfloat16), jnp.zeros((1, 6), jnp.int32)
    with pytest.raises(ValueError, match="needs an sm90 GPU"):
        peer_sum(part, peers)


def test_other_operands_must_be_like_the_part():
    part, peers = jnp.zeros((1, 4096), jnp.bfloat16), jnp.zeros((1, 6), jnp.int32)
    wide = jnp.zeros((1, 4096), jnp.float32)
    with pytest.raises(ValueError, match=r"residual must be bfloat16\[1, 4096\] like the part"):
        peer_sum(part, peers, residual=wide)
    for norms, row in ((wide, 0), (part, 1)):
        with pytest.raises(ValueError, match=f"norms must have a row {row} of 4096 numbers"):
            peer_sum_weighed(part, peers, residual=part, norms=norms, norm_row=row)


@needs_devices(2)
def test_one_device_and_hosts_have_no_mailboxes():
    devices = jax.devices()
    assert why_not_mailboxes(Mesh(np.asarray(devices[:1]), ("tensor",))) == "there is one device"
    if devices[0].platform == "cpu":
        two = Mesh(np.asarray(devices[:2]), ("tensor",))
        assert "needs an sm90 GPU" in (why_not_mailboxes(two) or "")


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("words", [1, 31, 128, 1024, 1025, 16384, 100_000, MOST_BYTES // 8])
def test_each_word_has_a_thread_and_each_counter_a_block(words, devices):
    sizes = Geometry(words, words, "bfloat16", devices, joins=False, weighs=False, norm_row=0)
    assert BLOCKS % sizes.blocks == 0
    threads = sizes.blocks * 128 * sizes.at_once
    assert threads * (sizes.rounds - 1) < words <= threads * sizes.rounds
    assert sizes.at_once * devices <= 8


def test_a_mailbox_has_two_slots_of_twice_the_bytes_for_each_device():
    assert mailbox_bytes(4) == 4 * BLOCKS + 2 * 4 * 2 * MOST_BYTES


@needs_devices(2)
def test_mailboxes_are_freed_once_nothing_refers_to_them():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("tensor",))
    made = make_mailboxes(mesh)
    memory = made.memory
    rows = [np.asarray(shard.data) for shard in made.peers.addressable_shards]
    assert [row[0, 0] for row in rows] == [0, 1]
    places = [shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards]
    for row in rows:
        assert row[0, 2:].view(np.uint64).tolist() == places
    assert not memory.is_deleted()
    del made
    assert memory.is_deleted()

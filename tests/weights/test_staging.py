"""Leaves that pass through reused buffers arrive as stored, whatever the sizes, and the buffers are given back."""

import logging
import re
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import load_params
from jaxkv.weights import staging
from jaxkv.weights.quantised.join_scales import with_scales
from jaxkv.weights.quantised.scheme import Scheme
from jaxkv.weights.rules import HeadPairs, Regrouped
from jaxkv.weights.safetensors import all_finite, open_checkpoint
from jaxkv.weights.staging import fill_leaves
from jaxkv.weights.stored_leaf import Arrangement, StoredLeaf

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class Client:
    """Stands in for the client of a device that can lock pages; it notes which are locked."""

    def __init__(self):
        self.locked = {}
        self.most = 0

    def dma_map(self, address, size):
        assert address % 4096 == size % 4 == 0
        assert address not in self.locked
        self.locked[address] = size
        self.most = max(self.most, len(self.locked))

    def dma_unmap(self, address):
        del self.locked[address]


@pytest.fixture
def staged(monkeypatch):
    """Makes loading on the CPU go through buffers as on a GPU; returns what chooses their size."""
    client = Client()
    put, wait = jax.device_put, jax.block_until_ready
    sent: dict[int, jax.Array] = {}
    awaited: list[jax.Array] = []

    def copy(memory, at):
        earlier = sent.get(memory.ctypes.data)
        assert earlier is None or any(earlier is one for one in awaited), (
            "written while it is copied"
        )
        # Like the copy to a GPU, it must not keep the buffer itself.
        sent[memory.ctypes.data] = jnp.copy(put(memory, at))
        return sent[memory.ctypes.data]

    def note(arrays):
        awaited.extend(jax.tree.leaves(arrays))
        return wait(arrays)

    monkeypatch.setattr(jax, "device_put", copy)
    monkeypatch.setattr(jax, "block_until_ready", note)
    monkeypatch.setattr(staging, "_staging_client", lambda at: client)
    monkeypatch.setattr(staging, "SMALL_BYTES", 0)

    def choose(buffer_bytes, buffers=3, readers=2):
        monkeypatch.setattr(staging, "BUFFER_BYTES", buffer_bytes)
        monkeypatch.setattr(staging, "BUFFERS", buffers)
        monkeypatch.setattr(staging, "READERS", readers)
        return client

    return choose


def write(folder, kit, tensors):
    kit.write_raw(folder / "model.safetensors", *kit.layout(tensors))


@pytest.mark.parametrize("buffer_bytes", [48, 100, 200, 2**20])
@pytest.mark.parametrize("buffers", [1, 3])
def test_a_model_is_the_same_through_buffers_of_any_size(
    tmp_path, kit, staged, monkeypatch, buffer_bytes, buffers
):
    tensors = kit.checkpoint_tensors(kit.CONFIG)
    kit.write_shards(tmp_path, tensors)
    client = staged(buffer_bytes, buffers)
    through = load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert 0 < client.most <= min(buffers, max(1, total // buffer_bytes))
    assert not client.locked
    monkeypatch.undo()
    directly = load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)
    jax.tree.map(np.testing.assert_array_equal, through, directly)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_bit_is_that_of_safetensors(tmp_path, kit, staged, dtype):
    staged(64)
    tensors = kit.checkpoint_tensors(kit.CONFIG, np.dtype(dtype))
    name = "model.layers.1.mlp.down_proj.weight"
    bits = tensors[name].view(f"u{tensors[name].itemsize}")
    # Minus zero, the smallest number and its negative.
    bits[0, :3] = 1 << (8 * bits.itemsize - 1), 1, (1 << (8 * bits.itemsize - 1)) + 1
    write(tmp_path, kit, tensors)
    params = load_params(tmp_path, kit.Toy(kit.CONFIG), dtype=dtype, progress=False)
    stored = load_file(tmp_path / "model.safetensors")
    for leaf, source in (
        (params["layers"][1]["down"], name),
        (params["embed"], "model.embed_tokens.weight"),
        (params["lm_head"], "lm_head.weight"),
    ):
        assert leaf.dtype.name == dtype
        assert np.asarray(leaf).tobytes() == stored[source].tobytes()


@pytest.mark.parametrize(
    ("source", "shape", "combine", "options"),
    [
        ((24, 6), (24, 6), "copy", {"pairs": HeadPairs(16, 8, 4)}),
        ((24, 6), (24, 6), "copy", {"regroup": Regrouped(4, (4, 2), (1, 0))}),
        ((24, 6), (4, 2, 6), "select", {"regroup": Regrouped(4, (4, 2), (1,))}),
        ((24, 6), (6, 24), "transpose", {}),
        ((24, 1, 4), (4, 24), "taps", {}),
        ((4, 6, 10), (4, 6, 10), "deinterleave", {}),
        ((4, 6, 10), (4, 6, 10), "deinterleave_rows", {}),
        ((4, 6, 10), (4, 10, 6), "deinterleave_transpose", {}),
        ((4, 6, 10), (10, 4, 6), "last_axis_first", {}),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(map(str, given)),
)
def test_the_device_arranges_a_leaf_as_the_host_does(
    tmp_path, kit, staged, source, shape, combine, options
):
    staged(64)
    numbers = np.arange(np.prod(source), dtype=np.float32).reshape(source)
    write(tmp_path, kit, {"x": numbers})
    with open_checkpoint(tmp_path) as stored:
        arrangement = Arrangement(shape, source[0], combine, **options)
        leaf = StoredLeaf("x", numbers.dtype, (stored["x"],), arrangement)
        on_host = leaf.read()
        assert not arrangement.moves_nothing
        assert not np.array_equal(on_host.reshape(-1)[: numbers.size], numbers.reshape(-1))
        arrived: list[int] = []
        (on_device,) = fill_leaves([leaf], None, arrived.append)
        np.testing.assert_array_equal(on_device, on_host)
        assert len(arrived) > 1
        assert sum(arrived) == numbers.nbytes


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("odd", [np.nan, -np.inf])
def test_a_number_that_is_not_finite_is_found_at_any_place(dtype, odd):
    size = 2**18 + 3
    numbers = np.linspace(-1, 1, size).astype(np.dtype(dtype))
    assert all_finite(numbers)
    for place in (0, 2**17 - 1, 2**17, 2**18, size - 1):
        before, numbers[place] = numbers[place], odd
        assert not all_finite(numbers)
        numbers[place] = before
    assert all_finite(numbers[:0])


def test_rows_of_scaled_numbers_are_read_from_any_row_on(tmp_path, kit, staged, monkeypatch):
    monkeypatch.setattr("jaxkv.weights.quantised.quantised_tensor.PIECE", 16)
    rng = np.random.default_rng(5)
    numbers = rng.standard_normal((13, 8)).astype(E4M3)
    scales = rng.standard_normal((4, 2)).astype(np.float32)
    write(tmp_path, kit, {"x": numbers, "x_scale_inv": scales})
    wanted = numbers.astype(np.float32) * np.kron(scales, np.ones((4, 4), np.float32))[:13]
    with open_checkpoint(tmp_path) as stored:
        scaled = with_scales(stored, Scheme("fp8", ("eight_bit",), "float8_e4m3fn", 4, (4, 4)))["x"]
        for first in range(13):
            some = np.zeros((min(3, 13 - first), 8), np.float32)
            scaled.read(some.reshape(-1), first * 8)
            np.testing.assert_array_equal(some, wanted[first : first + 3])
        staged(128)
        leaf = StoredLeaf("x", wanted.dtype, (scaled,), Arrangement((13, 8), 13, "copy"))
        (filled,) = fill_leaves([leaf], None, lambda count: None)
        np.testing.assert_array_equal(filled, wanted)


def test_an_error_in_a_reader_is_raised_once_and_unlocks_all_buffers(tmp_path, kit, staged):
    tensors = kit.checkpoint_tensors(kit.CONFIG)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][-1, -1] = np.inf
    write(tmp_path, kit, tensors)
    client = staged(64)
    with pytest.raises(BadCheckpoint, match=re.escape(name) + ".*infinity"):
        load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)
    assert client.most > 0
    assert not client.locked
    assert not [one.name for one in threading.enumerate() if one.name.startswith("jaxkv-load")]


def test_a_device_that_locks_no_pages_gets_the_same_and_is_logged_once(
    tmp_path, kit, staged, monkeypatch, caplog
):
    tensors = kit.checkpoint_tensors(kit.CONFIG)
    write(tmp_path, kit, tensors)
    staged(64)
    # That of the CPU has the function, which is not implemented.
    monkeypatch.setattr(staging, "_staging_client", lambda at: jax.devices("cpu")[0].client)
    with caplog.at_level(logging.WARNING):
        params = load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)
    (record,) = caplog.records
    assert "pageable memory: UNIMPLEMENTED" in record.message
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])


def test_a_cpu_keeps_the_memory_that_a_leaf_was_read_into(tmp_path, kit):
    write(tmp_path, kit, {"x": np.ones((64, 64), np.float32)})
    with open_checkpoint(tmp_path) as stored:
        leaf = StoredLeaf(
            "x", np.dtype(np.float32), (stored["x"],), Arrangement((64, 64), 64, "copy")
        )
        read = leaf.read()
        placed = jax.device_put(read, jax.devices("cpu")[0])
        assert placed.unsafe_buffer_pointer() == read.ctypes.data


class Limited(Client):
    """Locks one buffer, and then no more, as where the driver runs out of something."""

    def dma_map(self, address, size):
        if self.locked:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no more")
        super().dma_map(address, size)


def test_buffers_that_cannot_be_locked_are_used_as_they_are(
    tmp_path, kit, staged, monkeypatch, caplog
):
    tensors = kit.checkpoint_tensors(kit.CONFIG)
    write(tmp_path, kit, tensors)
    staged(64)
    client = Limited()
    monkeypatch.setattr(staging, "_staging_client", lambda at: client)
    with caplog.at_level(logging.WARNING):
        params = load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)
    assert [record.message.endswith("no more") for record in caplog.records] == [True]
    assert client.most == 1
    assert not client.locked
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])


@pytest.mark.gpu
def test_a_gpu_gets_every_bit_through_locked_pages(tmp_path, kit, monkeypatch, caplog):
    monkeypatch.setattr(staging, "SMALL_BYTES", 0)
    monkeypatch.setattr(staging, "BUFFER_BYTES", 2**16)
    rng = np.random.default_rng(11)
    tensors = {
        "a": rng.standard_normal((3000, 64)).astype(ml_dtypes.bfloat16),
        "b": rng.standard_normal((96, 4, 40)).astype(np.float32),
    }
    write(tmp_path, kit, tensors)
    with open_checkpoint(tmp_path) as stored, caplog.at_level(logging.WARNING):
        leaves = [
            StoredLeaf("a", tensors["a"].dtype, (stored["a"],), Arrangement((3000, 64), 1, "copy")),
            StoredLeaf(
                "b", tensors["b"].dtype, (stored["b"],), Arrangement((4, 96, 40), 1, "transpose")
            ),
        ]
        a, b = fill_leaves(leaves, None, lambda count: None)
    assert not caplog.records
    assert np.asarray(a).tobytes() == tensors["a"].tobytes()
    np.testing.assert_array_equal(b, tensors["b"].swapaxes(0, 1))

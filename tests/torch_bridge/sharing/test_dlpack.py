"""Zero-copy exchange of arrays and tensors, and refusals that name the reason."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge import NotZeroCopy, from_torch, to_torch
from torch_bridge.sharing.dlpack import as_bytes, is_compact

pytestmark = pytest.mark.torch

SHARED = [
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint16",
    "uint32",
    "bool",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
]


@pytest.mark.parametrize("dtype", SHARED)
def test_every_shared_dtype_crosses_both_ways_at_one_address(dtype):
    array = jnp.arange(64).reshape(4, 16).astype(dtype)
    tensor = to_torch(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    own = as_bytes(tensor).clone().view(tensor.dtype)
    back = from_torch(own)
    assert back.dtype == dtype
    assert back.unsafe_buffer_pointer() == own.data_ptr()
    np.testing.assert_array_equal(
        np.asarray(back.astype("complex64")), np.asarray(array.astype("complex64"))
    )


@pytest.mark.parametrize("dtype", SHARED)
def test_empty_tensors_cross(dtype):
    assert from_torch(torch.zeros(0, 3, dtype=getattr(torch, dtype))).shape == (0, 3)
    assert to_torch(jnp.zeros((0, 3), dtype)).shape == (0, 3)


REFUSED = {
    "int64": (lambda: torch.zeros(64, dtype=torch.int64), "cast it to torch.int32"),
    "float64": (lambda: torch.zeros(64, dtype=torch.float64), "cast it to torch.float32"),
    "columns": (lambda: torch.zeros(8, 64)[:, :32], "call .contiguous"),
    "steps": (lambda: torch.zeros(128)[::2], "call .contiguous"),
    "expanded": (lambda: torch.zeros(1, 16).expand(4, 16), "call .contiguous"),
    "misaligned": (lambda: torch.zeros(64)[1:33], "begins 4 bytes past"),
    "gradients": (lambda: torch.zeros(64, requires_grad=True), "call .detach"),
    "another device": (lambda: torch.zeros(64, device="meta"), "is on meta"),
    "sparse": (lambda: torch.eye(16).to_sparse(), "make it dense"),
    "conjugate": (lambda: torch.zeros(16, dtype=torch.complex64).conj(), "resolve_conj"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_jax_would_copy_is_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(NotZeroCopy, match=message):
        from_torch(make())


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"another device"}))
def test_a_copy_can_be_asked_for_and_shares_nothing(name):
    tensor = REFUSED[name][0]()
    array = from_torch(tensor, copy=True)
    wanted = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach().resolve_conj()
    np.testing.assert_array_equal(np.asarray(array), wanted.numpy().astype(array.dtype))
    if not tensor.is_sparse:
        assert array.unsafe_buffer_pointer() != tensor.data_ptr()


def test_numbers_that_do_not_fit_are_not_narrowed_even_into_a_copy():
    with pytest.raises(ValueError, match=r"do not fit torch\.int32"):
        from_torch(torch.tensor([2**40]), copy=True)


def test_permuted_but_compact_tensors_are_shared():
    tensor = torch.arange(64.0).reshape(2, 4, 8).transpose(0, 2)
    array = from_torch(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array), tensor.numpy())


def test_compactness_is_about_gaps_and_repeats_alone():
    assert is_compact((2, 3), (3, 1))
    assert is_compact((2, 3), (1, 2))
    assert is_compact((1, 3), (99, 1))
    assert is_compact((0, 3), (7, 7))
    assert not is_compact((2, 3), (4, 1))
    assert not is_compact((2, 3), (0, 1))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3b11fnuz"])
def test_what_torch_cannot_name_is_refused_on_the_way_out(dtype):
    with pytest.raises(NotZeroCopy, match="Store it as uint8"):
        to_torch(jnp.zeros((4, 4), dtype))


def test_bytes_and_back_is_no_conversion():
    numbers = jnp.asarray([0.5, -2.0, 448.0, 0.0], "float8_e4m3fn")
    raw = as_bytes(to_torch(numbers))
    assert raw.dtype == torch.uint8
    assert raw.data_ptr() == numbers.unsafe_buffer_pointer()
    assert raw.view(torch.float8_e4m3fn).float().tolist() == [0.5, -2.0, 448.0, 0.0]
    assert as_bytes(torch.zeros(2)).dtype == torch.float32


def test_a_view_keeps_the_memory_and_the_memory_the_view():
    array = jnp.full((256,), 3.0)
    view = to_torch(array)
    array.delete()
    jnp.full((256,), 7.0).block_until_ready()
    assert view.tolist() == [3.0] * 256
    tensor = torch.full((256,), 5.0)
    shared = from_torch(tensor)
    del tensor
    torch.full((256,), 9.0)
    assert shared.tolist() == [5.0] * 256


def test_an_array_on_several_devices_is_refused():
    class Spread:
        def devices(self):
            return {"one", "other"}

    with pytest.raises(NotZeroCopy, match="is on 2 devices"):
        to_torch(Spread())

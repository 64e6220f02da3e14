"""Checksums of tensors: every bit of every dtype and layout counts, on the CPU and on other devices."""

import pytest
import torch

from torch_bridge.transformers_cache import checksum as checksum_module
from torch_bridge.transformers_cache.checksum import begin_checksums, sum_on_device

pytestmark = pytest.mark.torch
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.int64,
    torch.complex64,
)


def of_the_host(tensor):
    return begin_checksums([tensor])()


def of_the_device(tensor):
    return int(sum_on_device([tensor]))


@pytest.fixture(params=[of_the_host, of_the_device])
def checksum(request):
    return request.param


@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (140001,)])
def test_every_element_of_every_dtype_counts(checksum, shape):
    for dtype in DTYPES:
        tensor = torch.zeros(shape, dtype=dtype)
        before = checksum(tensor)
        for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
            tensor.view(-1)[place] = True
            assert checksum(tensor) != before
            tensor.view(-1)[place] = False
        assert checksum(tensor) == before


@pytest.mark.parametrize("change", ["neg", "flip", "twice", "swap", "swap rows of bytes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_that_keep_the_bits_together_count(checksum, change, dtype):
    tensor = torch.randn(400, 512, generator=torch.Generator().manual_seed(2)).to(dtype)
    other = tensor.clone()
    match change:
        case "neg":
            other[::2] *= -1
        case "flip":
            other = other.flip(0)
        case "twice":
            other[0, :2] *= 2
        case "swap":
            other[[5, 6]] = other[[6, 5]]
        case "swap rows of bytes":
            # Whole rows of the first product, far apart.
            other[[8, 328]] = other[[328, 8]]
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(other)


def test_views_that_begin_off_a_word_are_read_too(checksum):
    tensor = torch.arange(64, dtype=torch.uint8)[1:].reshape(7, 9)
    before = checksum(tensor), checksum(tensor.T)
    tensor[3, 2] += 1
    after = checksum(tensor), checksum(tensor.T)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_a_tensor_that_torch_conjugates_when_it_is_read_has_the_checksum_of_what_it_is():
    tensor = torch.randn(6, dtype=torch.complex64)
    assert of_the_host(tensor.conj()) == of_the_host(tensor.conj().resolve_conj())
    assert of_the_host(tensor.conj().imag) == of_the_host(-tensor.imag)


def test_an_empty_tensor_has_a_checksum(checksum):
    assert checksum(torch.zeros(0, 4)) == checksum(torch.zeros(0, 4))


def test_a_device_sums_many_tensors_in_bounded_memory(monkeypatch):
    """With pending sums of a few bytes, all are summed up again and again, and each bit and the order count."""
    monkeypatch.setattr(checksum_module, "_PENDING", 4000)
    monkeypatch.setattr(checksum_module, "_WORDS", 9_000)
    draw = torch.Generator().manual_seed(3)
    parts = [
        torch.randint(0, 256, (size,), generator=draw, dtype=torch.uint8)
        for size in (70_000, 0, 3, 35_000, 34_816, 100)
    ]
    before = int(sum_on_device(parts))
    assert before == int(sum_on_device(parts))
    assert before != int(sum_on_device(parts[::-1]))
    for part in parts:
        for place in {0, len(part) - 1} if len(part) else ():
            part[place] += 1
            assert int(sum_on_device(parts)) != before
            part[place] -= 1

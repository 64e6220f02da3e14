"""Checksums of the bits of tensors, computed on the tensors' devices."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch

_WIDTH = 2048
"""Bytes of a row, which is multiplied by a matrix of factors."""
_SUMS = 8
"""Sums of a row; cuBLAS computes no fewer."""
_FEWEST = 17
"""Rows that cuBLAS needs at least."""
_PENDING = 1 << 24
"""Bytes of sums that are held before they are summed up again."""
_WORDS = 1 << 16
"""Most words of 32 bits in the last sum, which needs a factor for each; more than `_FEWEST` rows."""


def begin_checksums(
    tensors: Sequence[torch.Tensor],
    sum_tensors: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None,
) -> Callable[[], tuple[int, ...]]:
    """Queues the checksums of tensors on torch's current streams; returns a function that waits for them.

    They are integers that change if any bit of a tensor changes, with a collision chance of about 2**-32. On the CPU
    they are CRC-32, which this function computes itself. Every byte is read once.

    Args:
        tensors: dense tensors of any dtype and shape, on any devices. They are not changed.
        sum_tensors: computes the checksum of those on a device; `None` for `sum_on_device`.
    """
    found: list[int] = []
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            found.append(zlib.crc32(_bytes_of(tensor).numpy()))
        else:
            elsewhere.setdefault(tensor.device, []).append(tensor)
    sums = [read_later((sum_tensors or sum_on_device)(held)) for held in elsewhere.values()]
    return lambda: (*found, *(read() for read in sums))


def read_later(number: torch.Tensor) -> Callable[[], int]:
    """Queues a copy of one number to the host, and returns a function that waits for that copy alone.

    The number's memory may be written again by work that is queued afterwards.
    """
    if not number.is_cuda:
        value = int(number)
        return lambda: value
    held = torch.empty_like(number, device="cpu", pin_memory=True)
    held.copy_(number, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(number.device))

    def read() -> int:
        copied.synchronize()
        return int(held)

    return read


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's elements as uint8 [bytes]: a view, or a copy if the tensor is not contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def sum_on_device(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns a checksum of all tensors and their order, int64 of shape ().

    Rows of bytes are multiplied by factors as a matrix of int8, which tensor cores do as fast as the bytes arrive. The
    sums, an exact int32 each, are bytes again. The last 256 KiB are multiplied word by word, modulo 2**64. Each byte
    has a factor of its position at every level (a multilinear hash), so swapped bytes or flipped signs change the sum.

    Args:
        tensors: dense tensors on one device.
    """
    pending: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        summed = _summed(_bytes_of(tensor))
        pending += summed
        size += sum(part.numel() for part in summed)
        if size > _PENDING:
            pending = _summed(torch.cat(pending))
            size = sum(part.numel() for part in pending)
    everything = torch.cat(pending)
    while everything.numel() > 4 * _WORDS:
        everything = torch.cat(_summed(everything))
    missing = -everything.numel() % 4
    words = torch.nn.functional.pad(everything, (0, missing)).view(torch.int32)
    return (words * _word_factors(words.device)[: len(words)]).sum()


def _summed(raw: torch.Tensor) -> list[torch.Tensor]:
    """Returns bytes that stand for the given ones: the sums of all whole rows, and what is left."""
    rows = raw.numel() // _WIDTH
    if rows < _FEWEST:
        return [raw]
    whole = raw[: rows * _WIDTH]
    # The product needs aligned bytes.
    whole = whole if whole.data_ptr() % 16 == 0 else whole.clone()
    sums = torch._int_mm(whole.view(torch.int8).view(rows, _WIDTH), _row_factors(raw.device))
    return [sums.view(-1).view(torch.uint8), raw[rows * _WIDTH :]]


@cache
def _row_factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-64, 64, (_SUMS, _WIDTH), generator=generator, device="cpu") * 2 + 1
    return odd.to(torch.int8).to(device).t()


@cache
def _word_factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    low, high = -(1 << 63), (1 << 63) - 1
    return torch.randint(low, high, (_WORDS,), generator=generator, device="cpu").to(device)

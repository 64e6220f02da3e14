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


def checksums(
    tensors: Sequence[torch.Tensor],
    sum_parts: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None,
) -> tuple[int, ...]:
    """Returns integers that change if any bit of a tensor changes, with a collision chance of about 2**-32.

    Uses CRC-32 on the CPU. Every byte is read once. The host waits once per device.

    Args:
        tensors: dense tensors of any dtype and shape, on any devices. They are not changed.
        sum_parts: computes the checksum of the others on a device; `None` for `sum_on_device`.
    """
    found: list[int] = []
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        raw = plain.view(-1).view(torch.uint8)
        if raw.device.type == "cpu":
            found.append(zlib.crc32(raw.numpy()))
        else:
            elsewhere.setdefault(raw.device, []).append(raw)
    return (*found, *(int((sum_parts or sum_on_device)(parts)) for parts in elsewhere.values()))


def sum_on_device(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns a checksum of all parts and their order, int64 of shape ().

    Rows of bytes are multiplied by factors as a matrix of int8, which tensor cores do as fast as the bytes arrive. The
    sums, an exact int32 each, are bytes again. The last 256 KiB are multiplied word by word, modulo 2**64. Each byte
    has a factor of its position at every level (a multilinear hash), so swapped bytes or flipped signs change the sum.

    Args:
        parts: uint8 [bytes], on one device.
    """
    pending: list[torch.Tensor] = []
    size = 0
    for raw in parts:
        summed = _summed(raw)
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

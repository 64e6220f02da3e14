"""Checksums of the bits of tensors, computed on the tensors' devices."""

import zlib
from collections.abc import Sequence
from functools import cache

import torch

_FACTORS = 1 << 16
"""Words per sum."""
_ROWS = 128
"""Sums per pass; bounds the temporary products to 64 MiB."""


def checksums(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Returns integers that change if any bit of a tensor changes, with a collision chance of about 2**-32.

    Uses CRC-32 on the CPU and `sum_on_device` elsewhere. Every byte is read once. The host waits once per device.

    Args:
        tensors: dense tensors of any dtype and shape, on any devices. They are not changed.
    """
    found: list[int] = []
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        raw = plain.view(-1).view(torch.uint8)
        if raw.device.type == "cpu":
            found.append(zlib.crc32(raw.numpy()))
        else:
            sums.setdefault(raw.device, []).append(sum_on_device(raw))
    return (*found, *(one for parts in sums.values() for one in torch.cat(parts).tolist()))


def sum_on_device(raw: torch.Tensor) -> torch.Tensor:
    """Returns weighted sums, int64 [sums], each over 65,536 words of 32 bits; the last is padded with zeros.

    Each word is multiplied by a random factor of its position, modulo 2**64 (a multilinear hash), so swapped words or
    flipped signs change the sum.

    Args:
        raw: uint8 [bytes].
    """
    size = raw.numel()
    if size % 4 or raw.storage_offset() % 4:
        padded = raw.new_zeros(-(-size // 4) * 4)
        padded[:size] = raw
        raw = padded
    words, factors = raw.view(torch.int32), _factors(raw.device)
    whole = words.numel() // _FACTORS * _FACTORS
    passes = words[:whole].view(-1, _FACTORS).split(_ROWS)
    rest = words[whole:]
    last = (rest * factors[: len(rest)]).sum().view(1)
    return torch.cat([*((rows * factors).sum(1) for rows in passes), last])


@cache
def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    low, high = -(1 << 63), (1 << 63) - 1
    return torch.randint(low, high, (_FACTORS,), generator=generator, device="cpu").to(device)

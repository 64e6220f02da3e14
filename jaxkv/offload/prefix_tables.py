"""The names and checksums of the tables in a file of prefixes; `jaxkv.offload.prefix_file` describes the file."""

import zlib
from collections.abc import Iterable

import numpy as np

FORMAT = "jaxkv-prefixes-1"


def table_names(paged: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of a file's tables, in their order, given the names of its paged groups."""
    rows = (f"rows.{name}" for name in paged)
    return ("parents", "tokens", "checkpoint_rows", "tail_lengths", "tails", *rows)


def crc32(parts: Iterable[np.ndarray]) -> int:
    """Returns the CRC-32 of the bytes of some arrays."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(np.ascontiguousarray(part).view(np.uint8).reshape(-1), crc)
    return crc

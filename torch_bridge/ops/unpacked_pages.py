"""8-bit pages as bfloat16 copies for the kernel of packed queries, by operations of torch.

`pallas_kernels/ragged_attention/mosaic_unpack.py` does the same in XLA. Stored values are exact in bfloat16. Their
products with scales are not, so the kernel gets the scales apart.
"""

from typing import NamedTuple

import torch


class Stored(NamedTuple):
    """What 8-bit pages need beside themselves.

    Attributes:
        k_scales: float32 [pages, page_size, kv_heads].
        v_scales: the same for values.
        seq_lens: int32 [rows].
        cu_q_lens: int32 [rows + 1].
    """

    k_scales: torch.Tensor
    v_scales: torch.Tensor
    seq_lens: torch.Tensor
    cu_q_lens: torch.Tensor


def unpacked(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    stored: Stored,
    *,
    keys: int,
    window: int | None,
) -> tuple[torch.Tensor, ...]:
    """Returns copies of the pages in the order of the page table, the table for these, and scales tile by tile.

    Args:
        k_pages: [pages, page_size, kv_heads, head_dim] of float8_e4m3fn or int8.
        v_pages: the same for values.
        page_table: int32 [rows, table_width]; unused entries may have any value.
        stored: scales and lengths.
        keys: number of keys in a tile of the kernel.
        window: number of most recent keys that a query sees; `None` for all.

    Returns:
        `(k_pages, v_pages, page_table, k_scales, v_scales)`: pages in bfloat16, and scales [rows, kv_heads, tiles,
        keys], zero for keys that no query of the row sees.
    """
    rows, width = page_table.shape
    entries = page_table.flatten().clamp(0, len(k_pages) - 1).long()
    position = torch.arange(width * k_pages.shape[1], device=page_table.device)
    seen = position < stored.seq_lens[:, None]
    if window is not None:
        first_query = stored.seq_lens - stored.cu_q_lens.diff()
        seen &= position > first_query[:, None] - window
    table = torch.arange(rows * width, dtype=torch.int32, device=page_table.device)
    # Torch gathers no 8-bit floats.
    pages = [
        pool.view(torch.uint8)[entries].view(pool.dtype).bfloat16() for pool in (k_pages, v_pages)
    ]
    scales = [_by_tile(one[entries], seen, keys) for one in (stored.k_scales, stored.v_scales)]
    return (*pages, table.view(rows, width), *scales)


def _by_tile(scales: torch.Tensor, seen: torch.Tensor, keys: int) -> torch.Tensor:
    rows, length = seen.shape
    scales = torch.where(seen[..., None], scales.reshape(rows, length, -1), 0.0)
    scales = torch.nn.functional.pad(scales, (0, 0, 0, -length % keys))
    return scales.view(rows, -1, keys, scales.shape[2]).permute(0, 3, 1, 2).contiguous()

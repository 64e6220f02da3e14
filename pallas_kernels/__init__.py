"""Kernels for LLM inference on NVIDIA GPUs, as pure functions of JAX arrays.

Rule for every file here: no models, no requests, no page allocation. Callers pass page tables and index arrays.

- Attention: `paged_attention` (one query per row), `ragged_attention` (packed queries), `latent_attention` (MLA),
  `index_topk` and `sparse_attention` (DeepSeek sparse attention).
- Cache writes: `page_write`, `rotary_write` (RoPE fused with the write).
- Recurrent layers: `causal_conv`, `selective_scan` and `selective_update` (Mamba), `ssd_scan` and `ssd_update`
  (Mamba-2), `delta_scan` and `delta_update` (gated DeltaNet).
- Matrix products: `skinny_matmul` (few rows), `grouped_matmul` (rows sorted by expert), `gathered_matmul` (few rows,
  each with experts of its own).
- Routing to experts: `row_topk` (the best of each row), `group_rows` (rows sorted by what they choose).
- Sampling: `filter_bounds` (top-k and top-p thresholds).

The ops are loaded on first use, so importing a host module such as `pallas_kernels.dispatch` does not import JAX.
`pallas_kernels.<op>` is the function. The ops and `pallas_kernels.shared_keys.SharedKeys`, an argument of
`paged_attention`, are the public API; everything else is private. An op's files are imported with
`from pallas_kernels.<op> import <file>`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_kernels.causal_conv.api import causal_conv as causal_conv
    from pallas_kernels.delta_scan.api import delta_scan as delta_scan
    from pallas_kernels.delta_update.api import delta_update as delta_update
    from pallas_kernels.filter_bounds.api import filter_bounds as filter_bounds
    from pallas_kernels.gathered_matmul.api import gathered_matmul as gathered_matmul
    from pallas_kernels.group_rows.api import group_rows as group_rows
    from pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
    from pallas_kernels.index_topk.api import index_topk as index_topk
    from pallas_kernels.latent_attention.api import latent_attention as latent_attention
    from pallas_kernels.page_write.api import page_write as page_write
    from pallas_kernels.paged_attention.api import paged_attention as paged_attention
    from pallas_kernels.ragged_attention.api import ragged_attention as ragged_attention
    from pallas_kernels.rotary_write.api import rotary_write as rotary_write
    from pallas_kernels.row_topk.api import row_topk as row_topk
    from pallas_kernels.selective_scan.api import selective_scan as selective_scan
    from pallas_kernels.selective_update.api import selective_update as selective_update
    from pallas_kernels.skinny_matmul.api import skinny_matmul as skinny_matmul
    from pallas_kernels.sparse_attention.api import sparse_attention as sparse_attention
    from pallas_kernels.ssd_scan.api import ssd_scan as ssd_scan
    from pallas_kernels.ssd_update.api import ssd_update as ssd_update

__all__ = [
    "causal_conv",
    "delta_scan",
    "delta_update",
    "filter_bounds",
    "gathered_matmul",
    "group_rows",
    "grouped_matmul",
    "index_topk",
    "latent_attention",
    "page_write",
    "paged_attention",
    "ragged_attention",
    "rotary_write",
    "row_topk",
    "selective_scan",
    "selective_update",
    "skinny_matmul",
    "sparse_attention",
    "ssd_scan",
    "ssd_update",
]


class _Package(ModuleType):
    """Keeps `pallas_kernels.<op>` bound to the function; the import system would rebind it to the subpackage."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"{__name__}.{name}.api"), name)
    return globals()[name]

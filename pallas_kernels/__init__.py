"""Pure functions of arrays for inference on NVIDIA GPUs. Knows no model, no request and no owner of pages.

Attention (`paged_attention`, `ragged_attention`, `latent_attention`, `index_topk`, `sparse_attention`), its writes
(`page_write`, `rotary_write`), state-space layers (`causal_conv`, `ssd_scan`, `ssd_update`), products of few rows
(`skinny_matmul`) and of rows sorted by their matrices (`grouped_matmul`) are loaded on first use, so that importing a
host module such as `pallas_kernels.dispatch` does not import JAX. They are functions: their files are reached with
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
    from pallas_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
    from pallas_kernels.index_topk.api import index_topk as index_topk
    from pallas_kernels.latent_attention.api import latent_attention as latent_attention
    from pallas_kernels.page_write.api import page_write as page_write
    from pallas_kernels.paged_attention.api import paged_attention as paged_attention
    from pallas_kernels.ragged_attention.api import ragged_attention as ragged_attention
    from pallas_kernels.rotary_write.api import rotary_write as rotary_write
    from pallas_kernels.skinny_matmul.api import skinny_matmul as skinny_matmul
    from pallas_kernels.sparse_attention.api import sparse_attention as sparse_attention
    from pallas_kernels.ssd_scan.api import ssd_scan as ssd_scan
    from pallas_kernels.ssd_update.api import ssd_update as ssd_update

_OPS = (
    "causal_conv",
    "delta_scan",
    "delta_update",
    "filter_bounds",
    "grouped_matmul",
    "index_topk",
    "latent_attention",
    "page_write",
    "paged_attention",
    "ragged_attention",
    "rotary_write",
    "sparse_attention",
    "skinny_matmul",
    "ssd_scan",
    "ssd_update",
)


class _Package(ModuleType):
    """Keeps an op's name for its function: the import system would bind it to the subpackage of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _OPS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"{__name__}.{name}.api"), name)
    return globals()[name]

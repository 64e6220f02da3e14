"""Pure functions of arrays for inference on NVIDIA GPUs. Knows no model, no request and no owner of pages.

`paged_attention`, `ragged_attention`, `page_write` and `rotary_write` are loaded on first use, so that importing a
host module such as `pallas_kernels.dispatch` does not import JAX. They are functions: their files are reached with
`from pallas_kernels.<op> import <file>`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_kernels.page_write.api import page_write as page_write
    from pallas_kernels.paged_attention.api import paged_attention as paged_attention
    from pallas_kernels.ragged_attention.api import ragged_attention as ragged_attention
    from pallas_kernels.rotary_write.api import rotary_write as rotary_write

_OPS = ("page_write", "paged_attention", "ragged_attention", "rotary_write")


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

"""PyTorch on jaxkv's memory: leases, Transformers caches, kernels on tensors, torch inside a step.

The names in `__all__` and the modules `kernels`, `inside`, `weights` and `memory` are the public API; everything else
is private.
"""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"torch_bridge needs {error.name}, which is not installed: pip install 'jaxkv[torch]'",
        name=error.name,
    ) from error

from jaxkv.errors import CacheLeased, CachePoisoned
from torch_bridge.batching.generate import generate
from torch_bridge.errors import LeaseLeaked, NotZeroCopy
from torch_bridge.sharing.dlpack import from_torch, to_torch
from torch_bridge.sharing.leases import Lease, lease
from torch_bridge.transformers_cache import (
    attention,  # noqa: F401 - registers "jaxkv" with Transformers
)
from torch_bridge.transformers_cache.cache import JaxkvCache, JaxkvCacheStats

__all__ = [
    "CacheLeased",
    "CachePoisoned",
    "JaxkvCache",
    "JaxkvCacheStats",
    "Lease",
    "LeaseLeaked",
    "NotZeroCopy",
    "from_torch",
    "generate",
    "lease",
    "to_torch",
]

"""Limits of JAX's and torch's allocators in one process, to be set before JAX first uses the GPU.

By default JAX allocates three quarters of the GPU's memory at its first use, and torch allocates as needed; neither
returns memory. The order of import makes no difference. Memory that JAX imports from torch counts as torch's, and
leased memory as JAX's.
"""

import os

import torch
from jax._src import xla_bridge

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def share_memory(jax_share: float, torch_share: float | None = None) -> None:
    """Limits the memory that JAX and torch may allocate on each GPU; both allocate as needed up to their limits.

    Args:
        jax_share: JAX's share of the GPU's memory, above 0 and below 1, for pools and temporaries of programs.
        torch_share: torch's share, for the model's weights and activations; `None` for the rest, less 5 % for the CUDA
            contexts and libraries of both.

    Raises:
        ValueError: a share is out of range, or both add up to more than 1.
        RuntimeError: JAX has already initialised its devices and no longer reads the settings.
    """
    if torch_share is None:
        torch_share = max(0.0, 0.95 - jax_share)
    if not (0 < jax_share < 1 and 0 < torch_share < 1 and jax_share + torch_share <= 1):
        raise ValueError(
            f"shares must be between 0 and 1 and add up to at most 1, got {jax_share} for JAX and {torch_share} for "
            f"torch"
        )
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            f"JAX has initialised its devices and no longer reads {PREALLOCATE} and {FRACTION}; call share_memory() "
            f"before the first computation, or set both in the environment"
        )
    os.environ[PREALLOCATE] = "false"
    os.environ[FRACTION] = f"{jax_share:.4f}"
    for index in range(torch.cuda.device_count()):
        torch.cuda.set_per_process_memory_fraction(torch_share, index)

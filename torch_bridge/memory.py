"""Two allocators in one process: how much of a GPU each may take. Call it before JAX first touches the GPU.

By default JAX takes three quarters of the GPU at its first use and keeps them, and torch takes what it needs and keeps
that. Which of the two is imported first makes no difference. Memory that JAX imports from torch is counted by torch
alone, and leased memory by JAX alone.
"""

import os

import torch
from jax._src import xla_bridge

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def share_memory(jax_share: float, torch_share: float | None = None) -> None:
    """Bounds what JAX and torch may allocate on each GPU, and lets both take memory as they need it.

    Args:
        jax_share: of the GPU's memory, above 0 and below 1: our pools, and what programs need.
        torch_share: likewise: the model's weights and activations; `None` for what JAX leaves, less 5 % for the
            CUDA contexts and libraries of both.

    Raises:
        ValueError: a share is out of range, or both are more than the whole.
        RuntimeError: JAX has begun to use its devices, after which it takes no more orders.
    """
    if torch_share is None:
        torch_share = max(0.0, 0.95 - jax_share)
    if not (0 < jax_share < 1 and 0 < torch_share < 1 and jax_share + torch_share <= 1):
        raise ValueError(
            f"shares must lie between 0 and 1 and add up to at most 1, got {jax_share} for JAX and {torch_share} for "
            f"torch"
        )
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            f"JAX has begun to use its devices and reads {PREALLOCATE} and {FRACTION} no more; call share_memory() "
            f"before anything computes, or set both in the environment"
        )
    os.environ[PREALLOCATE] = "false"
    os.environ[FRACTION] = f"{jax_share:.4f}"
    for index in range(torch.cuda.device_count()):
        torch.cuda.set_per_process_memory_fraction(torch_share, index)

"""What the device that JAX compiles for can do. Knows no kernel."""

import jax
from jax.extend.backend import get_default_device

# A Hopper SM has 228 KB of shared memory, of which each resident block costs 1 KB besides what it asks for; one
# block may ask for at most 227 KB.
SHARED_BYTES = 228 * 1024
SHARED_BYTES_PER_BLOCK = 227 * 1024
RESERVED_BYTES_PER_BLOCK = 1024
HOPPER = 90
NUM_MULTIPROCESSORS = 132
# Bytes that the address of each array in shared memory is a multiple of.
SHARED_ALIGNMENT = 1024
# Rows of the left operand of one tensor-core product (wgmma).
WGMMA_ROWS = 64
# Rows of a tile of swizzled shared memory; copies into it begin at a multiple of them.
ROW_TILE = 8
# Blocks along one of several axes of a grid; only the last one goes further.
MOST_ON_AN_AXIS = 2**16 - 1

NEWEST_JAX = (0, 11)
"""Newest JAX under which Mosaic GPU kernels are known to compile."""


def gpu_arch() -> int | None:
    """Returns the default device's compute capability as 10 * major + minor, `None` if it is no NVIDIA GPU.

    The default device is the one set by `jax.default_device`, which may be a topology's device that is only
    compiled for, and otherwise the first device of the default backend.
    """
    device = get_default_device()
    capability = getattr(device, "compute_capability", None)
    if not isinstance(capability, str) or not capability.replace(".", "").isdigit():
        return None
    major, minor = capability.split(".")
    return 10 * int(major) + int(minor)


def why_not_hopper() -> str | None:
    """Returns why kernels written for Hopper cannot run on the default device, or `None` if they can."""
    arch = gpu_arch()
    if arch == HOPPER:
        return None
    found = "no NVIDIA GPU" if arch is None else f"sm{arch}"
    return f"needs an sm{HOPPER} GPU, found {found}"


def why_not_mosaic() -> str | None:
    """Returns why Mosaic GPU kernels cannot run on the default device under this JAX, or `None` if they can.

    Under JAX 0.12 inferring a kernel's layouts did not end within minutes; under 0.11.2 it takes a second.
    """
    hopper = why_not_hopper()
    if hopper is not None or jax.__version_info__[:2] <= NEWEST_JAX:
        return hopper
    return f"was made for jax 0.11, and jax {jax.__version__} takes minutes to infer its layouts"

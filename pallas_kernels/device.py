"""Limits of Hopper SMs, and whether the device that JAX compiles for can run Mosaic GPU kernels."""

import jax
from jax.experimental.topologies import get_topology_desc
from jax.extend.backend import get_default_device
from jaxlib._jax import Device

# A Hopper SM has 228 KB of shared memory. One block may request at most 227 KB, and each resident block costs 1 KB
# more than it requests.
SHARED_BYTES = 228 * 1024
SHARED_BYTES_PER_BLOCK = 227 * 1024
RESERVED_BYTES_PER_BLOCK = 1024
HOPPER = 90
NUM_MULTIPROCESSORS = 132
# Alignment in bytes of each array in shared memory.
SHARED_ALIGNMENT = 1024
# M of one wgmma instruction: rows of its left operand.
WGMMA_ROWS = 64
# Rows of one swizzle atom in shared memory; a copy into a swizzled tile starts at a multiple of these rows.
ROW_TILE = 8
# Most blocks along a grid axis other than the last. The last axis becomes CUDA's x axis, which allows more.
MOST_ON_AN_AXIS = 2**16 - 1

DESCRIBED_H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 62914560
  memory_bandwidth: 4800000000000
  device_memory_size: 150000000000
}
"""
"""What XLA asks of a device, in the text form of its GpuTargetConfigProto.

Without the driver's version it assumes one too old to capture custom calls and conditionals in command buffers.
"""

NEWEST_JAX = (0, 12)
"""Newest JAX version (major, minor) with which a GPU has run the tests of the Mosaic GPU kernels."""


def gpu_arch() -> int | None:
    """Returns the default device's compute capability as 10 * major + minor, or `None` if it is not an NVIDIA GPU.

    The default device is the one set by `jax.default_device`, or else the first device of the default backend. It may
    be the device of a topology description, for ahead-of-time compilation without a GPU.
    """
    device = get_default_device()
    capability = getattr(device, "compute_capability", None)
    if not isinstance(capability, str) or not capability.replace(".", "").isdigit():
        return None
    major, minor = capability.split(".")
    return 10 * int(major) + int(minor)


def described_gpu() -> Device:
    """Returns an H200 that JAX can compile for without one; the CUDA plugin of JAX must be installed."""
    described = get_topology_desc("h200", "cuda", target_config=DESCRIBED_H200, topology="1x1x1")
    return described.devices[0]


def why_not_hopper() -> str | None:
    """Returns why kernels written for Hopper cannot run on the default device, or `None` if they can."""
    arch = gpu_arch()
    if arch == HOPPER:
        return None
    found = "no NVIDIA GPU" if arch is None else f"sm{arch}"
    return f"needs an sm{HOPPER} GPU, found {found}"


def why_not_mosaic() -> str | None:
    """Returns why Mosaic GPU kernels cannot run on the default device under this JAX, or `None` if they can.

    JAX newer than `NEWEST_JAX` is refused: Mosaic GPU's interfaces and its assembler change between versions.
    """
    hopper = why_not_hopper()
    if hopper is not None or jax.__version_info__[:2] <= NEWEST_JAX:
        return hopper
    newest = ".".join(map(str, NEWEST_JAX))
    return f"was tested with jax up to {newest}, found {jax.__version__}"

"""The version of NCCL, which JAX 0.12 needs for its sums over several GPUs even where a kernel of XLA computes them."""

import ctypes

import jax

OLDEST = (2, 29)
"""Oldest NCCL (major, minor) with which JAX 0.12 asks for peers' memory; 2.28.9 fails in every sum."""


def why_not_nccl() -> str | None:
    """Returns why this JAX cannot sum over several GPUs with the NCCL that it has loaded, or `None` if it can.

    Call it after JAX has found its GPUs, which loads NCCL. A library that cannot be asked is not refused.
    """
    if jax.__version_info__ < (0, 12):
        return None
    found = library_version()
    if found is None or found[:2] >= OLDEST:
        return None
    wanted, version = (".".join(map(str, numbers)) for numbers in (OLDEST, found))
    return (
        f"jax {jax.__version__} needs NCCL {wanted} or newer for several GPUs, found NCCL {version}; run pip install "
        f"--no-deps 'nvidia-nccl-cu13>={wanted}' (nvidia-nccl-cu12 with CUDA 12), after PyTorch if it has an older one"
    )


def library_version(name: str = "libnccl.so.2") -> tuple[int, int, int] | None:
    """Returns the version of NCCL: of the library that the process has loaded, or else that the loader finds.

    Args:
        name: file or path of the library.
    """
    code = ctypes.c_int()
    try:
        status = ctypes.CDLL(name).ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):
        return None
    if status != 0:
        return None
    # NCCL's own form since 2.9: 10000 * major + 100 * minor + patch.
    return code.value // 10000, code.value // 100 % 100, code.value % 100

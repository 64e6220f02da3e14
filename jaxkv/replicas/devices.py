"""Which devices each replica has: the variables of its process, in which JAX opens no other device."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxkv.config.checks import as_int

MOST = 64
"""Most replicas behind one front."""


def replica_count(count: int) -> int:
    """Returns `data_parallel_size` as a number; raises `ValueError` if it is none or out of range."""
    return as_int("data_parallel_size", count, 1, MOST)


def child_environment() -> dict[str, str]:
    """Returns the variables with which a child process finds the same jaxkv as this one."""
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONUNBUFFERED": "1",
    }


def replica_environments(replicas: int, devices: int) -> list[dict[str, str]]:
    """Returns the variables for the process of each replica; replica i has the devices [i * devices, (i+1) * devices).

    On a machine without GPUs every replica has a CPU of its own, as many virtual devices as it needs.

    Args:
        replicas: number of replicas.
        devices: devices that compute the model together (`tensor_parallel_size`).

    Raises:
        ValueError: there are GPUs here, but too few.
    """
    gpus = visible_gpus(os.environ)
    if gpus is None:
        return [{"JAX_NUM_CPU_DEVICES": str(devices)} for _ in range(replicas)]
    if len(gpus) < replicas * devices:
        raise ValueError(
            f"data_parallel_size = {replicas} with tensor_parallel_size = {devices} needs {replicas * devices} GPUs, "
            f"and {len(gpus)} are visible here; lower one of them"
        )
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + devices])}
        for first in range(0, replicas * devices, devices)
    ]


def visible_gpus(
    environment: Mapping[str, str], devices: Path = Path("/dev")
) -> Sequence[str] | None:
    """Returns the NVIDIA GPUs that a process would see, as CUDA names them; `None` if JAX would run on the CPU.

    It starts no driver: a front that opened the GPUs would take memory of each.

    Args:
        environment: variables of the process.
        devices: the folder of device files.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    names = devices.iterdir() if devices.is_dir() else ()
    here = sum(re.fullmatch(r"nvidia\d+", each.name) is not None for each in names)
    if not here or (platforms and not re.search(r"cuda|gpu", platforms)):
        return None
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(number) for number in range(here)]
    return [name for name in chosen.split(",") if name.strip()]

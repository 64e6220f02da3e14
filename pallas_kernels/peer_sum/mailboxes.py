"""Mailboxes: memory of each GPU that the other GPUs of the process write to, and the table of their addresses.

All GPUs of one process have one space of addresses (CUDA C++ Programming Guide, Unified Virtual Addressing), and JAX
lets each of them access the memory of the others, so an address is all that a kernel needs to write to another GPU.
"""

import ctypes
import weakref
from contextlib import suppress
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from pallas_kernels.device import why_not_mosaic

MOST_BYTES = 4 * 2**20
"""Most bytes of an array that mailboxes carry."""

BLOCKS = 128
"""Most blocks of a launch, and counters of a mailbox."""

HEADER = 4 * BLOCKS
"""Bytes before a mailbox's slots: the counters."""

SLOT = 2 * MOST_BYTES
"""Bytes of a slot: 4 bytes of data and 4 of a flag, again and again."""


@dataclass(frozen=True)
class Mailboxes:
    """The mailboxes of the devices of a mesh, all empty at first.

    Attributes:
        memory: int32 `[devices, words]`, one mailbox on each device. No program has it as an argument. Once nothing
            refers to the mailboxes, it is freed after all programs that are in flight on the devices.
        peers: int32 `[devices, 2 + 2 * devices]`, a row on each device: its number, a zero, and the addresses of all
            mailboxes in the order of the mesh, two words each.
    """

    memory: Int[Array, "devices words"]
    peers: Int[Array, "devices numbers"]


def mailbox_bytes(devices: int) -> int:
    """Returns the bytes of one device's mailbox: counters, and two slots for each device, used in turn."""
    return HEADER + 2 * devices * SLOT


def peers_shape(devices: int) -> tuple[int, int]:
    """Returns the shape of `Mailboxes.peers`."""
    return devices, 2 + 2 * devices


def why_not_mailboxes(mesh: Mesh | AbstractMesh) -> str | None:
    """Returns why the devices of a mesh cannot have mailboxes, or `None` if they can.

    Those of an abstract mesh are taken for such as the default device, in one process.
    """
    if mesh.size == 1:
        return "there is one device"
    if isinstance(mesh, AbstractMesh):
        return why_not_mosaic()
    if mesh.is_multi_process:
        return "the devices are those of several processes, which have spaces of addresses of their own"
    devices = list(mesh.devices.flat)
    for device in devices:
        with jax.default_device(device):
            refusal = why_not_mosaic()
        if refusal is not None:
            return refusal
    return _why_not_peers([device.local_hardware_id for device in devices])


def make_mailboxes(mesh: Mesh) -> Mailboxes:
    """Allocates empty mailboxes for the devices of a mesh, which `why_not_mailboxes` does not refuse."""
    devices = mesh.size
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    memory = jnp.zeros((devices, mailbox_bytes(devices) // 4), jnp.int32, device=sharding)
    # The zeros must be there before the first word of another device arrives.
    memory = jax.block_until_ready(memory)
    at = {shard.device: shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards}
    addresses = np.asarray([at[device] for device in mesh.devices.flat], np.uint64)
    table = np.zeros(peers_shape(devices), np.int32)
    table[:, 0] = np.arange(devices)
    table[:, 2:] = addresses.view(np.int32)
    mailboxes = Mailboxes(memory, jax.device_put(table, sharding))
    weakref.finalize(mailboxes, _free, memory).atexit = False
    return mailboxes


def _free(memory: Array) -> None:
    """Frees mailboxes. JAX does not know which programs write to them, and would give the memory to others."""
    with suppress(RuntimeError):
        # Runs on each device after all that it was given before.
        jax.block_until_ready(jnp.zeros(memory.shape[0], jnp.int32, device=memory.sharding))
        memory.delete()


def _why_not_peers(ordinals: list[int]) -> str | None:
    """Returns why CUDA devices cannot all access each other's memory, or `None` if they can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"CUDA's driver was not found: {error}"
    can = ctypes.c_int()
    for one in ordinals:
        for other in ordinals:
            if one == other:
                continue
            status = driver.cuDeviceCanAccessPeer(ctypes.byref(can), one, other)
            if status != 0 or not can.value:
                return f"GPU {one} cannot access the memory of GPU {other}"
    return None

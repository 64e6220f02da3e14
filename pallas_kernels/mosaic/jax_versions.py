"""Operations of kernels that are written differently for JAX 0.11 and for JAX 0.12."""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pallas_kernels.mosaic.private_types import Ref

_plain_store = getattr(plgpu, "store", None)
"""JAX 0.11 has no such function."""

HONOURS_REGISTER_REQUESTS = _plain_store is None
"""Whether this JAX's assembler honours `setmaxnreg`; tests change it, all else calls `honours_register_requests`."""


OVERLAPS_LAUNCHES = _plain_store is not None
"""Whether kernels are nodes of one CUDA graph; tests change it, all else calls `overlaps_launches`."""


def honours_register_requests() -> bool:
    """Returns whether warpgroups of a block can have different numbers of registers (`setmaxnreg`).

    JAX 0.12 assembles kernels with libnvJitLink, which ignores such requests: each thread has 65536 / threads
    registers, at most 255. There a block of two consumers has no producer, and consumers fetch what they multiply.
    """
    return HONOURS_REGISTER_REQUESTS


def overlaps_launches() -> bool:
    """Returns whether a kernel's launch can overlap the end of the kernel before it, in a CUDA graph too.

    JAX 0.11 captures each kernel into a graph of its own, which has no programmatic edges to others.
    """
    return OVERLAPS_LAUNCHES


def request_registers(count: int, *, more: bool) -> None:
    """Requests `count` registers per thread, more or less than a warpgroup starts with, where that is honoured."""
    if honours_register_requests():
        plgpu.set_max_registers(count, action="increase" if more else "decrease")


def assign(ref: Ref, index: Any, value: ArrayLike) -> None:  # noqa: ANN401 - all that a reference takes
    """Performs `ref[index] = value` on global or shared memory, even if threads wait for one another's banks.

    From JAX 0.12 on, the statement itself is refused unless the layout of `value` avoids such waits.
    """
    if _plain_store is None:
        ref[index] = value
    else:
        _plain_store(ref.at[index], jnp.asarray(value), optimized=False)


def first_rows(size: int) -> pl.Slice:
    """Returns the slice of the first `size` rows for a TMA copy, which fills rows past the array's end with zeros.

    From JAX 0.12 on, a slice that is known to pass the end is refused, so its start is no constant.
    """
    start = 0 if _plain_store is None else lax.full((), 0, jnp.int32)
    return pl.ds(start, size)

"""Transfers a cache's buffers in place to new JAX arrays by donation.

Each lease starts and ends with such a transfer. Donation invalidates the old arrays, so that only the new holder can
use the memory. On the device the transfer runs after the work of the previous holder.
"""

import jax
from jax import lax


def pass_on(arrays: tuple[jax.Array, ...], token: jax.Array) -> tuple[jax.Array, ...]:
    """Returns new arrays in the same memory. Donates `arrays`.

    The program waits for `token`, an array that is ready when torch's queued work is done (`dlpack.fence`). If a
    buffer is referenced elsewhere and cannot be donated, the call raises on a GPU, and copies it on a CPU, see `moved`.

    It runs immediately, also while a function is traced, since Python's garbage collector may end a lease at any time.
    """
    with jax.ensure_compile_time_eval():
        return _pass_on(arrays, token)


@jax.jit(donate_argnums=0)
def _pass_on(arrays: tuple[jax.Array, ...], token: jax.Array) -> tuple[jax.Array, ...]:
    # The barrier makes the results depend on the token; otherwise XLA would drop it as unused.
    return lax.optimization_barrier((arrays, token))[0]


def moved(names: tuple[str, ...], arrays: tuple[jax.Array, ...], pointers: list[int]) -> list[str]:
    """Returns the names of the arrays that were copied: those whose addresses differ from `pointers`."""
    return [
        name
        for name, array, pointer in zip(names, arrays, pointers, strict=True)
        if array.unsafe_buffer_pointer() != pointer and array.size
    ]

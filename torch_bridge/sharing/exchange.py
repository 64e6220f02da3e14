"""Transfers a cache's buffers in place to new JAX arrays by donation; a lease starts and ends with it."""

import jax
from jax import lax


def pass_on(arrays: tuple[jax.Array, ...], token: jax.Array) -> tuple[jax.Array, ...]:
    """Returns new arrays in the same memory, ordered after the token. Donates `arrays`.

    It runs immediately, also while a function is traced, since Python's garbage collector may end a lease at any time.
    """
    with jax.ensure_compile_time_eval():
        return _pass_on(arrays, token)


@jax.jit(donate_argnums=0)
def _pass_on(arrays: tuple[jax.Array, ...], token: jax.Array) -> tuple[jax.Array, ...]:
    return lax.optimization_barrier((arrays, token))[0]


def moved(names: tuple[str, ...], arrays: tuple[jax.Array, ...], pointers: list[int]) -> list[str]:
    """Returns the names of arrays whose addresses differ from `pointers`."""
    return [
        name
        for name, array, pointer in zip(names, arrays, pointers, strict=True)
        if array.size and array.unsafe_buffer_pointer() != pointer
    ]

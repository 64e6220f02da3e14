"""Buffers under new handles, where they lie: what a lease begins and ends with."""

import jax
from jax import lax


def pass_on(arrays: tuple[jax.Array, ...], token: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the same memory under new handles, once the token exists. Donates the arrays.

    It runs at once, also while a function is traced: Python's garbage collector may end a lease at any time.
    """
    with jax.ensure_compile_time_eval():
        return _pass_on(arrays, token)


@jax.jit(donate_argnums=0)
def _pass_on(arrays: tuple[jax.Array, ...], token: jax.Array) -> tuple[jax.Array, ...]:
    return lax.optimization_barrier((arrays, token))[0]


def moved(names: tuple[str, ...], arrays: tuple[jax.Array, ...], pointers: list[int]) -> list[str]:
    """Returns the names of arrays that do not lie where they lay."""
    return [
        name
        for name, array, pointer in zip(names, arrays, pointers, strict=True)
        if array.size and array.unsafe_buffer_pointer() != pointer
    ]

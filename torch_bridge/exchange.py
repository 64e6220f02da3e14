"""Buffers under new handles, where they lie: what a lease begins and ends with."""

import jax
from jax import lax


@jax.jit(donate_argnums=0)
def pass_on(arrays: tuple[jax.Array, ...], token: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the same memory under new handles, once the token exists. Donates the arrays."""
    return lax.optimization_barrier((arrays, token))[0]


def moved(names: tuple[str, ...], arrays: tuple[jax.Array, ...], pointers: list[int]) -> list[str]:
    """Returns the names of arrays that do not lie where they lay."""
    return [
        name
        for name, array, pointer in zip(names, arrays, pointers, strict=True)
        if array.size and array.unsafe_buffer_pointer() != pointer
    ]

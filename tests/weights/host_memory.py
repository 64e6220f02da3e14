"""How much memory of the host a call needs."""

import tracemalloc

_TRIES = 12


def fits_in(num_bytes, call):
    """Returns whether `call` needs fewer bytes of the host at its peak, in one of a few tries.

    JAX gives the buffers of finished copies back when it comes to it; what the call itself holds is the least of
    several peaks.
    """
    for _ in range(_TRIES):
        tracemalloc.start()
        try:
            call()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        if most < num_bytes:
            return True
    return False

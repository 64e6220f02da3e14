"""Settings of JAX's compilation cache for the length of a test."""

from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache


def set_cache(**settings):
    """Changes settings of JAX's compilation cache. JAX decides once whether it has one, unless that is reset."""
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@contextmanager
def cache_settings(**settings):
    """Changes settings as `set_cache` does, and restores them."""
    before = {name: getattr(jax.config, name) for name in settings}
    set_cache(**settings)
    try:
        yield
    finally:
        set_cache(**before)

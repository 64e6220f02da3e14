"""The memories of a simulated device: NumPy arrays, and host memory with copies that take several polls."""

import jax
import jaxtyping
import numpy as np

from jaxkv.cache import owner
from jaxkv.cache.prefix import index as prefix
from jaxkv.cache.state import Cache


class DeviceArray(np.ndarray):
    """A NumPy array with the methods of a device array that the engine uses."""

    deleted = False

    @property
    def aval(self):
        return self.shape, self.dtype

    def is_deleted(self):
        return self.deleted

    def delete(self):
        self.deleted = True

    def is_ready(self):
        return True

    def copy_to_host_async(self):
        pass

    @property
    def sharding(self):
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def on_device(values):
    return np.array(values).view(DeviceArray)


def put_caches_on_device(patch):
    """Makes every new cache one of NumPy, and leaves types unchecked: that takes longer than the calls."""

    def init_cache(layout, counts, *, device=None):
        arrays = layout.arrays(counts)
        return Cache(
            arrays=tuple(on_device(np.zeros(one.shape, one.dtype)) for one in arrays),
            keys=tuple((one.layer, one.role) for one in arrays),
        )

    patch.setattr(owner, "init_cache", init_cache)
    # Of two pages that were used at the same time, the name decides which goes first.
    patch.setattr(prefix.secrets, "token_bytes", lambda count: bytes(count))
    patch.setattr(jaxtyping.config, "jaxtyping_disable", True)


class Late:
    """An array on its way to the device, which holds junk until it was asked for often enough.

    Args:
        values: what it will hold.
        polls: number of polls before the copy has arrived.
    """

    def __init__(self, values, polls):
        self._values, self._polls = np.asarray(values), polls

    def is_ready(self):
        self._polls -= 1
        return self._polls < 0

    def block_until_ready(self):
        self._polls = -1
        return self

    def __array__(self, dtype=None, copy=None):
        there = self._polls < 0
        return self._values if there else np.full_like(self._values, np.nan)


class SlowMemory:
    """Stands in for `HostMemory`.

    Args:
        draw: decides how long each copy takes.
    """

    kind, reason = "simulated", ""

    def __init__(self, draw):
        self._draw = draw

    def copy_to_host(self, units):
        return list(units)

    def wait_for_copies(self, units):
        return list(units)

    def copy_to_device(self, units, places):
        return [tuple(Late(one, self._draw.choice((0, 0, 1, 4))) for one in unit) for unit in units]

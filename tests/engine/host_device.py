"""A small cache, a tier on the host, and the transfers between them."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache.kept_pages.keys import page_key
from jaxkv.cache.kept_pages.tree import Node
from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import Cache
from jaxkv.cache.variants import gqa, place, sampling
from jaxkv.offload.memory import HostMemory
from jaxkv.offload.programs import swap_lowering
from jaxkv.offload.swap_in import SwapIn
from jaxkv.offload.tier import HostTier
from jaxkv.offload.transfers import HostTransfers
from jaxkv.programs.manifest import Programs
from tests.cache.layouts import counts_of, every_variant

ALL = every_variant()
PAGED = group_layers(place([gqa(2, 4, dtype="bfloat16", page_size=4)] * 2 + [sampling(5)]))
_PROGRAMS = {}


class Device:
    """A cache full of random bytes, on one device or divided by a mesh, and the part of a runner that moves them."""

    def __init__(self, layout, count, seed=0, mesh=None):
        self.layout = layout
        self.owner = CacheOwner(layout, counts_of(layout, count), device=mesh)
        self.programs = _PROGRAMS.setdefault((repr(layout), count, mesh), Programs())
        self.scramble(seed)

    def scramble(self, seed):
        draw = np.random.default_rng(seed)
        cache = self.owner.take()
        arrays = [
            jnp.array(
                _values(draw, array.nbytes, array.dtype).reshape(array.shape), device=array.sharding
            )
            for array in cache.arrays
        ]
        self.owner.put(Cache(arrays=tuple(arrays), keys=cache.keys))

    def program(self, declared):
        cache, counts = self.owner.handle().cache, self.owner.counts
        return self.programs.get(
            declared,
            lambda: swap_lowering(self.layout, counts, declared, cache),
        )

    def run_read_only(self, declared, *arrays):
        return self.program(declared)(self.owner.handle().cache, *arrays)

    def update(self, declared, *arguments):
        program = self.program(declared)
        return self.owner.run(lambda cache: program(cache, *arguments))

    def unit(self, name, unit):
        return self.units(name)[unit]

    def units(self, name):
        """Returns a digest of each page or state, over all its arrays in the cache's order."""
        group, cache = self.layout.group(name), self.owner.handle().cache
        arrays = [
            # A copy: NumPy's view of the array itself could not be donated.
            np.array(jnp.copy(array))
            for key, array in zip(cache.keys, cache.arrays, strict=True)
            if key in {(layer, one.role) for layer in group.layers for one in group.spec.arrays}
        ]
        return [
            hashlib.md5(b"".join(array[at].tobytes() for array in arrays)).hexdigest()
            for at in range(self.owner.counts[name])
        ]


def _values(draw, num_bytes, dtype):
    """Returns random bytes as numbers. A CPU that widens bfloat16 would change the bits of denormal ones and of NaN."""
    values = draw.integers(0, 256, num_bytes, np.uint8).view(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        values[np.isnan(values)] = np.nan
        values[np.abs(values) < jnp.finfo(dtype).tiny] = 0
    return values


class Host:
    """A tier, and transfers between it and a device."""

    def __init__(self, device, num_bytes=2**24):
        self.device = device
        self.tier = HostTier(device.layout, num_bytes, page_size=4)
        self.transfers = HostTransfers(device, self.tier, HostMemory(jax.devices()[0]))
        device.owner.before_donation(self.transfers.flush)

    def leave(self, name, ids):
        """Lets pages go; returns their handles."""
        handles = []
        for at in ids:
            key = page_key(b"nobody", at.to_bytes(4, "little"))
            assert self.tier.offer_page(name, Node(key, at, 0, 0))
            handles.append(self.tier.find(name, key).page)
        return handles

    def back(self, moves):
        """Brings pages back; returns whether all came."""
        inbound = self.transfers.start(SwapIn(-1, 1, 1, moves=moves))
        done = False
        while done is False:
            done = self.transfers.advance(inbound, wait=True)
        return bool(done)

"""`RecordedStates`: the states of recurrent layers in a recorded decode step, by ids at fixed addresses.

A layer's states are copied out of the pool when the model first reads them, and back when the next layer's are, so a
graph holds the copies of one layer at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from jaxkv.cache.spec import Group
from torch_bridge.transformers_cache.cache_layers import StateLayer
from torch_bridge.transformers_cache.lent_states import state_pools
from torch_bridge.transformers_cache.tables import FixedStates


@dataclass(frozen=True)
class _Layer:
    number: int
    layer: StateLayer
    group: Group


class RecordedStates:
    """Binds the layers of a cache for one recorded forward; end it with `write_back` or `drop`.

    Args:
        groups: the groups of states.
        pools: leased tensors by name.
        ids: group name -> the ids of each row's states.
        layers: the cache's layers.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        pools: Mapping[str, torch.Tensor],
        ids: Mapping[str, FixedStates],
        layers: Sequence[object],
    ) -> None:
        self._pools, self._ids = pools, ids
        self._out: _Layer | None = None
        self._waiting: dict[int, _Layer] = {}
        for group in groups:
            for number in group.layers:
                layer = layers[number]
                assert isinstance(layer, StateLayer), "a layer with states is a StateLayer"
                one = self._waiting[number] = _Layer(number, layer, group)
                layer.bind(
                    state_pools(pools, group, number), partial(self._read, one), has_previous=True
                )

    def _read(self, one: _Layer) -> Mapping[str, torch.Tensor]:
        """Copies the rows' states of a layer out of the pool, after those of the layer before it were written."""
        self._write()
        self._out = self._waiting.pop(one.number)
        read = self._ids[one.group.name].read
        pools = state_pools(self._pools, one.group, one.number)
        return {role: pool.index_select(0, read) for role, pool in pools.items()}

    def _write(self) -> None:
        """Writes the states that are out to the pool. Padding rows write zeros to state 0, which has them already."""
        if self._out is None:
            return
        one, self._out = self._out, None
        write = self._ids[one.group.name].write.long()
        pools = state_pools(self._pools, one.group, one.number)
        for pool, new in zip(pools.values(), one.layer.unbind(), strict=True):
            real = (write > 0).view(-1, *[1] * (new.ndim - 1))
            pool.index_copy_(0, write, torch.where(real, new, 0).to(pool.dtype))

    def write_back(self) -> None:
        """Writes what is still out, and moves the states of layers that the model did not read."""
        for one in list(self._waiting.values()):
            one.layer.lend()
        self._write()

    def drop(self) -> None:
        """Takes the states from the layers without keeping them; does nothing after `write_back`."""
        for one in (*self._waiting.values(), *filter(None, [self._out])):
            one.layer.unbind()
        self._waiting.clear()
        self._out = None

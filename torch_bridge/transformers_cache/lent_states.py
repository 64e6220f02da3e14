"""`LentStates`: the states of a batch's rows, lent to the recurrent layers of a model for one forward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from jaxkv.cache.spec import Group
from torch_bridge.sharing.leases import Lease
from torch_bridge.transformers_cache.cache_layers import StateLayer
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.tables import upload


@dataclass(frozen=True)
class _Lent:
    """One array of one layer.

    Attributes:
        pool: the states of all rows of all caches, [states, *shape]; leased.
        held: what the layer was given, [rows, *shape]: a part of the pool, or a copy of its rows.
        write: index of each row's new state, int64 [rows]; `None` where `held` is a part of the pool.
    """

    pool: torch.Tensor
    held: torch.Tensor
    write: torch.Tensor | None


class LentStates:
    """Gives the layers their rows' states, and takes the new ones back.

    Where the rows' states lie side by side in the pool, the layers update them there. Elsewhere, and where a gradient
    may be recorded, they get copies, which `take_back` writes to the pool. A layer's states are lent by `lend`, or when
    the model first reads them; a forward that is replayed in the model's place needs none.

    Args:
        sequences: the rows, with states reserved for the forward.
        lease: write lease of the whole pool.
        layers: the cache's layers.
        has_previous: whether the rows have columns from earlier forwards.
    """

    def __init__(
        self, sequences: Sequences, lease: Lease, layers: Sequence[object], *, has_previous: bool
    ) -> None:
        self._lease, self._has_previous = lease, has_previous
        self._lent: dict[int, list[_Lent]] = {}
        self._bound: list[tuple[int, StateLayer, Group, _Ids]] = []
        for group in sequences.store.layout.state_groups:
            ids = _Ids(sequences, group)
            for number in group.layers:
                layer = layers[number]
                assert isinstance(layer, StateLayer), "a layer with states is a StateLayer"
                self._bound.append((number, layer, group, ids))
        self.bind()

    def bind(self) -> None:
        """Gives the layers their states, if they were given others meanwhile; nothing may have been lent yet."""
        for number, layer, group, ids in self._bound:
            pools = state_pools(self._lease, group, number)
            layer.bind(
                pools, partial(self._lend, number, group, ids), has_previous=self._has_previous
            )

    def end_replay(self, *, replayed: bool) -> None:
        """Drops the states after a replay, which has written new ones; lends them to a forward that must run."""
        if replayed:
            self.drop()
        elif not self._lent:
            # A recording that failed has given the layers other states.
            self.bind()
            self.lend()

    def lend(self) -> None:
        """Lends the states of all layers now."""
        for _, layer, _, _ in self._bound:
            layer.lend()

    def _lend(self, number: int, group: Group, ids: "_Ids") -> Mapping[str, torch.Tensor]:
        pools = state_pools(self._lease, group, number)
        lent = {role: ids.lend(pool, self._has_previous) for role, pool in pools.items()}
        self._lent[number] = list(lent.values())
        return {role: one.held for role, one in lent.items()}

    def take_back(self) -> None:
        """Writes new states to the pool where the layers had copies or replaced what they were given."""
        for number, layer, _, _ in self._bound:
            # A layer that read nothing keeps its state, which may have to be moved.
            layer.lend()
            for one, new in zip(self._lent.pop(number), layer.unbind(), strict=True):
                if one.write is not None:
                    one.pool[one.write] = new.detach()
                elif new is not one.held:
                    one.held.copy_(new.detach())
        self._bound.clear()

    def drop(self) -> None:
        """Takes the states from the layers without keeping them."""
        for _, layer, _, _ in self._bound:
            layer.unbind()
        self._bound.clear()
        self._lent.clear()


def state_pools(
    pools: Mapping[str, torch.Tensor], group: Group, layer: int
) -> dict[str, torch.Tensor]:
    """Returns role -> the states of all rows of all caches in one layer; they are leased, so do not keep them."""
    return {array.role: pools[f"layer{layer}.{array.role}"] for array in group.spec.arrays}


class _Ids:
    """Where the states of one group's rows are: the ones to read and the ones to write."""

    def __init__(self, sequences: Sequences, group: Group) -> None:
        allocator = sequences.store.allocator
        ids = [allocator.states(row.number, group.name) for row in sequences.rows]
        self._device = sequences.store.device
        self._read, self._write = np.array(ids, np.int64).T
        self._first, self._stop = int(self._write[0]), int(self._write[0]) + len(ids)
        side_by_side = np.array_equal(self._write, np.arange(self._first, self._stop))
        self._in_place = side_by_side and not torch.is_grad_enabled()
        (self._moved,) = (self._read != self._write).nonzero()

    @cached_property
    def _moves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows whose state moves, and where it is read."""
        return upload(self._moved, self._device), upload(self._read[self._moved], self._device)

    @cached_property
    def _ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of each row's state to read, and of the one to write."""
        return upload(self._read, self._device), upload(self._write, self._device)

    def lend(self, pool: torch.Tensor, has_previous: bool) -> _Lent:
        """Returns the rows' states in one array of one layer."""
        if not self._in_place:
            read, write = self._ends
            return _Lent(pool, pool[read], write)
        held = pool[self._first : self._stop]
        if not has_previous:
            held.zero_()
        elif len(self._moved):
            rows, source = self._moves
            held[rows] = pool[source]
        return _Lent(pool, held, None)

"""`LentStates`: the states of a batch's rows, lent to the recurrent layers of a model for one forward."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    may be recorded, they get copies, which `take_back` writes to the pool.

    Args:
        sequences: the rows, with states reserved for the forward.
        lease: write lease of the whole pool.
        layers: the cache's layers.
        has_previous: whether the rows have columns from earlier forwards.
    """

    def __init__(
        self, sequences: Sequences, lease: Lease, layers: Sequence[object], *, has_previous: bool
    ) -> None:
        self._lent: list[tuple[StateLayer, list[_Lent]]] = []
        for group in sequences.store.layout.state_groups:
            ids = _Ids(sequences, group)
            for number in group.layers:
                layer = layers[number]
                assert isinstance(layer, StateLayer), "a layer with states is a StateLayer"
                lent = {
                    array.role: ids.lend(lease[f"layer{number}.{array.role}"], has_previous)
                    for array in group.spec.arrays
                }
                layer.bind(
                    {role: one.held for role, one in lent.items()}, has_previous=has_previous
                )
                self._lent.append((layer, list(lent.values())))

    def take_back(self) -> None:
        """Writes new states to the pool where the layers had copies or replaced what they were given."""
        for layer, lent in self._lent:
            for one, new in zip(lent, layer.unbind(), strict=True):
                if one.write is not None:
                    one.pool[one.write] = new.detach()
                elif new is not one.held:
                    one.held.copy_(new.detach())
        self._lent.clear()

    def drop(self) -> None:
        """Takes the states from the layers without keeping them."""
        for layer, _ in self._lent:
            layer.unbind()
        self._lent.clear()


class _Ids:
    """Where the states of one group's rows are: the ones to read and the ones to write."""

    def __init__(self, sequences: Sequences, group: Group) -> None:
        allocator, device = sequences.store.allocator, sequences.store.device
        ids = [allocator.states(row.number, group.name) for row in sequences.rows]
        read, write = np.array(ids, np.int64).T
        self._first, self._stop = int(write[0]), int(write[0]) + len(write)
        side_by_side = np.array_equal(write, np.arange(self._first, self._stop))
        self._in_place = side_by_side and not torch.is_grad_enabled()
        (moved,) = (read != write).nonzero()
        self._moved = upload(moved, device) if len(moved) else None
        self._moved_from = upload(read[moved], device)
        self._read, self._write = upload(read, device), upload(write, device)

    def lend(self, pool: torch.Tensor, has_previous: bool) -> _Lent:
        """Returns the rows' states in one array of one layer."""
        if not self._in_place:
            return _Lent(pool, pool[self._read], self._write)
        held = pool[self._first : self._stop]
        if not has_previous:
            held.zero_()
        elif self._moved is not None:
            held[self._moved] = pool[self._moved_from]
        return _Lent(pool, held, None)

"""Page tables and slots of one forward for one group of layers, for torch and for the ops.

`GroupTables` makes them from the rows. `FixedTables` are tensors that a recorded step reads at fixed addresses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import jax
import numpy as np
import torch

from jaxkv.cache.spec import Group
from torch_bridge.ops.direct import Plan
from torch_bridge.sharing.dlpack import from_torch
from torch_bridge.transformers_cache.sequences import Sequences

_SMALLEST_TABLE = 8


class GroupTables:
    """Page table and slots of one paged group in one step.

    Args:
        group: the group of layers.
        sequences: the rows, whose counts include the step's tokens.
        new: int [rows], number of new tokens.

    Attributes:
        pages: page table on the host, int32 [rows, width]; page 0 behind a row's last page.
        slots_of_new: slot of each new token on the host, row after row, int [tokens].
    """

    def __init__(self, group: Group, sequences: Sequences, new: np.ndarray) -> None:
        allocator, rows = sequences.store.allocator, sequences.rows
        self._device = sequences.store.device
        self._page_size = group.page_size
        pages = [allocator.pages(row.number, group.name) for row in rows]
        # The table is padded with page 0; masks and lengths exclude the padding.
        self.pages = np.zeros((len(rows), max(1, *map(len, pages))), np.int32)
        for line, held in zip(self.pages, pages, strict=True):
            line[: len(held)] = held
        # Tokens that are computed again for recurrent layers alone have their pages in the prefix index.
        held = [allocator.held(row.number).covered.get(group.name, 0) for row in rows]
        self._past_end = allocator.pool(group.name).num_total * group.page_size
        lengths = np.array([row.num_tokens for row in rows])
        self.slots_of_new = self._slots_of_last(lengths, new, np.array(held))

    def _slots_of_last(
        self, lengths: np.ndarray, new: np.ndarray, covered: np.ndarray
    ) -> np.ndarray:
        """Returns the slots of each row's last `new` tokens, row after row, int [tokens].

        Args:
            lengths: int [rows], tokens of each row.
            new: int [rows], number of new tokens.
            covered: int [rows], leading tokens that are not written; their slots are past the last page.
        """
        row = np.repeat(np.arange(len(new)), new)
        before = np.cumsum(new) - new
        token = np.arange(len(row)) + np.repeat(lengths - new - before, new)
        slots = self.pages[row, token // self._page_size] * self._page_size + (
            token % self._page_size
        )
        return np.where(token < covered[row], self._past_end, slots)

    @cached_property
    def written(self) -> torch.Tensor | None:
        """Indices of the new tokens that are written, int64 [written]; `None` if all are."""
        if (self.slots_of_new < self._past_end).all():
            return None
        return upload(np.flatnonzero(self.slots_of_new < self._past_end), self._device)

    @cached_property
    def slots(self) -> torch.Tensor:
        """Slot of each new token, row after row, int64 [tokens]; past the last page for those not written."""
        return upload(self.slots_of_new, self._device)

    @cached_property
    def narrow_slots(self) -> torch.Tensor:
        """`slots` as int32, for the ops."""
        return torch.from_numpy(self.slots_of_new.astype(np.int32)).to(self._device, copy=True)

    def places(self, token_of_column: torch.Tensor) -> torch.Tensor:
        """Returns the slot of each column's token, int64 [rows, columns]."""
        pages = upload(self.pages, self._device)
        page = pages.gather(1, token_of_column // self._page_size)
        return page * self._page_size + token_of_column % self._page_size

    @cached_property
    def page_table(self) -> torch.Tensor:
        """Page table for the ops, int32 [rows, width]; the width is padded, so that few programs are compiled."""
        rows, width = self.pages.shape
        wide = np.zeros((rows, padded(width, _SMALLEST_TABLE)), np.int32)
        wide[:, :width] = self.pages
        return torch.from_numpy(wide).to(self._device, copy=True)

    @cached_property
    def page_table_array(self) -> jax.Array:
        """`page_table` as a JAX array."""
        return from_torch(self.page_table)


@dataclass(frozen=True)
class FixedGroup:
    """Tables of one paged group at fixed addresses.

    Attributes:
        page_table: int32 [rows, width].
        narrow_slots: slot of each new token, int32 [tokens]; past the last page for padding.
        slots: the same as int64.
    """

    page_table: torch.Tensor
    narrow_slots: torch.Tensor

    @property
    def slots(self) -> torch.Tensor:
        """`narrow_slots` as int64."""
        return self.narrow_slots.long()


@dataclass(frozen=True)
class FixedStates:
    """Ids of the rows' states in one group of states at fixed addresses.

    Attributes:
        read: id of the state that each row reads, int32 [rows]; 0 for a padding row.
        write: id of the state that each row writes, int32 [rows]; 0 for a row that writes none.
    """

    read: torch.Tensor
    write: torch.Tensor


@dataclass(frozen=True)
class FixedPrompt:
    """What a recorded prompt reads beside the tables of a decode step.

    Attributes:
        cu_q_lens: bounds of each row's tokens among the packed ones, int32 [rows + 1].
        is_padding: which of the packed tokens belong to no row, bool [tokens].
        tiles: returns the results of an attention kernel's plan at fixed addresses.
    """

    cu_q_lens: torch.Tensor
    is_padding: torch.Tensor
    tiles: Callable[[Plan], list[torch.Tensor]]


@dataclass(frozen=True)
class FixedTables:
    """What a recorded step reads in place of tables made from the rows.

    Attributes:
        seq_lens: tokens of each row, the step's included, int32 [rows]; 0 for a padding row.
        groups: name of a paged group -> its tables.
        states: name of a group of states -> its ids.
        prompt: what a packed prompt has beside these; `None` in a decode step.
    """

    seq_lens: torch.Tensor
    groups: Mapping[str, FixedGroup]
    states: Mapping[str, FixedStates]
    prompt: FixedPrompt | None = None


class NotRecordable(RuntimeError):
    """A forward computes on the host with a value that changes from step to step, so no graph can replay it."""


class UnknownCount:
    """A number of cached tokens inside a recording: it may be passed on, and raises when it is computed with.

    It is no `int`, since torch would read the value of one.
    """

    def _refuse(self, *_: Any) -> NoReturn:  # noqa: ANN401 - any operand
        raise NotRecordable(
            "the model's code computes on the host with the number of cached tokens, which changes at each step"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __index__ = _refuse
    __floordiv__ = __truediv__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = __int__ = _refuse
    __eq__ = __ne__ = __bool__ = __float__ = __hash__ = _refuse  # pyright: ignore[reportAssignmentType]


def upload(indices: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns indices as an int64 tensor on the device."""
    return torch.from_numpy(indices.astype(np.int64)).to(device, non_blocking=True)


def padded(size: int, smallest: int) -> int:
    """Returns `size` rounded up to a power of two, at least `smallest`; programs are compiled for these sizes."""
    return max(smallest, 1 << (size - 1).bit_length())

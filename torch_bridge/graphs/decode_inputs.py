"""`DecodeInputs`: the tensors at fixed addresses from which a recorded decode step reads everything that changes.

A step copies token ids and positions on the device, and uploads a few integers per row: its length, the page, table
column and slot of its new token, and the states that it reads and writes. Whole page tables are uploaded only when the
rows are others than in the step before.
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import CacheLayout
from torch_bridge.transformers_cache.sequences import Sequence
from torch_bridge.transformers_cache.tables import FixedGroup, FixedStates, FixedTables

ALIGNMENT = 16
"""Integers between two lines of the packed array, so that each line is aligned for kernels and for XLA."""
_PER_GROUP, _PER_STATES = 3, 2
"""Lines of a paged group: slots, columns and pages; and of a group of states: what is read and what is written."""


class DecodeInputs:
    """Inputs of decode steps of up to `rows` rows.

    Rows from the number of real ones on are padding: they have length 0, a slot past the last page and state 0.

    Args:
        layout: the groups of layers.
        allocator: knows the pages of each row.
        rows: number of rows that are recorded.
        device: torch's device.

    Attributes:
        ids, positions: int64 [rows, 1].
        tables: lengths, slots, page tables and states.
    """

    def __init__(
        self, layout: CacheLayout, allocator: PageAllocator, rows: int, device: torch.device
    ) -> None:
        groups = self._groups = layout.paged_groups
        self._states = layout.state_groups
        self._allocator, self._rows, self._device = allocator, rows, device
        self._stride = -(-rows // ALIGNMENT) * ALIGNMENT
        totals = {group.name: allocator.pool(group.name).num_total for group in groups}
        self._past = {group.name: totals[group.name] * group.page_size for group in groups}
        self._first_state = 1 + _PER_GROUP * len(groups)
        num_lines = self._first_state + _PER_STATES * len(self._states)
        with torch.inference_mode(False):
            self.ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
            self.positions = torch.zeros(rows, 1, dtype=torch.int64, device=device)
            self._packed = torch.zeros(num_lines, self._stride, dtype=torch.int32, device=device)
            self._page_tables = {
                name: torch.zeros(rows, total, dtype=torch.int32, device=device)
                for name, total in totals.items()
            }
        self._loaded: list[tuple[int, int, int]] = []
        fixed = {
            group.name: FixedGroup(self._page_tables[group.name], self._line(index, 0))
            for index, group in enumerate(groups)
        }
        states = {
            group.name: FixedStates(*self._packed[self._lines_of_states(index), :rows])
            for index, group in enumerate(self._states)
        }
        self.tables = FixedTables(self._packed[0, :rows], fixed, states)

    def fill(self, rows: Rows[Sequence], ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Queues the copies of one step's inputs on torch's current stream. The host does not wait.

        Args:
            rows: the real rows; their counts include the step's token, whose page is reserved.
            ids: [rows, 1], on the device.
            positions: [rows or 1, 1], on the device.
        """
        count = len(rows)
        torch._foreach_copy_(
            [self.ids[:count], self.positions[:count]], [ids, positions.expand(count, 1)]
        )
        now = [(row.number, row.num_crops, row.num_tokens) for row in rows]
        if self._loaded != [(number, crops, length - 1) for number, crops, length in now]:
            self._load_tables(rows)
        self._loaded = now
        self._packed.copy_(pinned(self._pack(rows), self._device), non_blocking=True)

    def withhold_states(self) -> None:
        """Has no row write a state until `fill`: a step that runs more than once would advance them more than once."""
        for states in self.tables.states.values():
            states.write.zero_()

    def update_tables(self) -> None:
        """Puts each row's newest page into the tables, on the device; a part of the recorded work."""
        for index, group in enumerate(self._groups):
            columns, pages = self._line(index, 1), self._line(index, 2)
            self._page_tables[group.name].scatter_(1, columns.long()[:, None], pages[:, None])

    def _pack(self, rows: Rows[Sequence]) -> np.ndarray:
        count = len(rows)
        packed = np.zeros(tuple(self._packed.shape), np.int32)
        lengths = packed[0, :count] = [row.num_tokens for row in rows]
        del lengths
        last = packed[0, :count] - 1
        for index, group in enumerate(self._groups):
            slots, columns, pages = packed[1 + _PER_GROUP * index :][:_PER_GROUP]
            slots[count:] = self._past[group.name]
            columns[:count] = last // group.page_size
            pages[:count] = [
                self._allocator.pages(row.number, group.name)[column]
                for row, column in zip(rows, columns[:count].tolist(), strict=True)
            ]
            slots[:count] = pages[:count] * group.page_size + last % group.page_size
            if self._states:
                slots[:count][last < self._covered(rows, group.name)] = self._past[group.name]
        for index, group in enumerate(self._states):
            ids = [self._allocator.states(row.number, group.name) for row in rows]
            packed[self._lines_of_states(index), :count] = np.array(ids).T
        return packed

    def _covered(self, rows: Rows[Sequence], group: str) -> np.ndarray:
        """Returns how many leading tokens of each row have their pages in the prefix index, int [rows].

        Such a token may be computed again for recurrent layers alone, and its page is not written.
        """
        return np.array([self._allocator.held(row.number).covered.get(group, 0) for row in rows])

    def _load_tables(self, rows: Rows[Sequence]) -> None:
        for group in self._groups:
            pages = [self._allocator.pages(row.number, group.name) for row in rows]
            table = np.zeros((len(rows), max(map(len, pages))), np.int32)
            for line, held in zip(table, pages, strict=True):
                line[: len(held)] = held
            target = self._page_tables[group.name][: len(rows), : table.shape[1]]
            target.copy_(pinned(table, self._device), non_blocking=True)

    def _line(self, group: int, which: int) -> torch.Tensor:
        """Returns a group's slots (0), columns (1) or pages (2), int32 [rows]."""
        return self._packed[1 + _PER_GROUP * group + which, : self._rows]

    def _lines_of_states(self, index: int) -> slice:
        """Returns the lines of a group of states: the ids that are read, and those that are written."""
        first = self._first_state + _PER_STATES * index
        return slice(first, first + _PER_STATES)


def pinned(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns numbers for a copy to the device, in pinned memory, which torch reuses only after queued copies."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory() if device.type == "cuda" else tensor

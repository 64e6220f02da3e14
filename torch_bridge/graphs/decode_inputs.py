"""`DecodeInputs`: the tensors at fixed addresses from which a recorded decode step reads everything that changes.

A step copies token ids and positions on the device, and uploads a few integers per row: its length, and the page,
table column and slot of its new token. Whole page tables are uploaded only when the rows are others than in the step
before.
"""

from collections.abc import Sequence as Rows

import numpy as np
import torch

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import Group
from torch_bridge.transformers_cache.sequences import Sequence
from torch_bridge.transformers_cache.tables import FixedGroup, FixedTables

_ALIGNMENT = 16
"""Integers between two lines of the packed array, so that each line is aligned for kernels and for XLA."""
_PER_GROUP = 3


class DecodeInputs:
    """Inputs of decode steps of up to `rows` rows.

    Rows from the number of real ones on are padding: they have length 0 and a slot past the last page.

    Args:
        groups: the paged groups of layers.
        allocator: knows the pages of each row.
        rows: number of rows that are recorded.
        device: torch's device.

    Attributes:
        ids, positions: int64 [rows, 1].
        tables: lengths, slots and page tables.
    """

    def __init__(
        self, groups: tuple[Group, ...], allocator: PageAllocator, rows: int, device: torch.device
    ) -> None:
        self._groups, self._allocator, self._rows = groups, allocator, rows
        self._device = device
        self._stride = -(-rows // _ALIGNMENT) * _ALIGNMENT
        totals = {group.name: allocator.pool(group.name).num_total for group in groups}
        self._past = {name: total * self._group(name).page_size for name, total in totals.items()}
        num_lines = 1 + _PER_GROUP * len(groups)
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
        self.tables = FixedTables(self._packed[0, :rows], fixed)

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
        self._packed.copy_(self._pinned(self._pack(rows)), non_blocking=True)

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
        return packed

    def _load_tables(self, rows: Rows[Sequence]) -> None:
        for group in self._groups:
            pages = [self._allocator.pages(row.number, group.name) for row in rows]
            table = np.zeros((len(rows), max(map(len, pages))), np.int32)
            for line, held in zip(table, pages, strict=True):
                line[: len(held)] = held
            target = self._page_tables[group.name][: len(rows), : table.shape[1]]
            target.copy_(self._pinned(table), non_blocking=True)

    def _pinned(self, numbers: np.ndarray) -> torch.Tensor:
        """Returns a copy in pinned memory, which torch reuses only after the copies that read it."""
        tensor = torch.from_numpy(numbers)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _line(self, group: int, which: int) -> torch.Tensor:
        """Returns a group's slots (0), columns (1) or pages (2), int32 [rows]."""
        return self._packed[1 + _PER_GROUP * group + which, : self._rows]

    def _group(self, name: str) -> Group:
        return next(group for group in self._groups if group.name == name)

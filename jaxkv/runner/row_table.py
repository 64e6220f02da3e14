"""A persistent table of page tables and sampling parameters, one row per running sequence.

A step gathers its rows from the table by index, so its cost hardly grows with the number of rows. A row is written when
its sequence first runs and when its pages have changed. vLLM calls the same idea a persistent batch.
"""

from collections.abc import Mapping, Sequence
from operator import is_

import numpy as np

from jaxkv.cache.page_allocator import PageAllocator, SequenceView
from jaxkv.cache.spec import CacheLayout
from jaxkv.sampling.fields import FIELDS, RequestSampling

_FEWEST_PAGES = 16


class RowTable:
    """The table. The row of a sequence has the index of its entry in the sampling group.

    Args:
        layout: the cache's groups.
        counts: group name -> pages or states of that group.

    Attributes:
        tables: paged group's name -> page table, int32 [entries, width], 0 past a row's end; it grows when needed.
        pages: paged group's name -> number of pages, int32 [entries].
        first: paged group's name -> tokens before the first page; their pages were freed out of the window,
            int32 [entries].
        covered: paged group's name -> tokens in shared pages, which are not written, int32 [entries].
        sampling: name of a sampling parameter -> its values, [entries] or [entries, width].
    """

    def __init__(self, layout: CacheLayout, counts: Mapping[str, int]) -> None:
        entries = counts["sampling"]
        names = [group.name for group in layout.paged_groups]
        self._owners: list[SequenceView | None] = [None] * entries
        self._changes = [0] * entries
        self._params: list[object] = [None] * entries
        # The views, sampling parameters, changes and entries of the last call of `update`.
        self._last_held: list[SequenceView] = []
        self._last_sampling: Sequence[RequestSampling] = ()
        self._last_changes: list[int] = []
        self._last_entries = np.zeros(0, np.int64)
        self.tables: dict[str, np.ndarray] = {
            name: np.zeros((entries, _FEWEST_PAGES), np.int32) for name in names
        }
        self.pages = {name: np.zeros(entries, np.int32) for name in names}
        self.first = {name: np.zeros(entries, np.int32) for name in names}
        self.covered = {name: np.zeros(entries, np.int32) for name in names}
        self._page_sizes = {group.name: group.page_size for group in layout.paged_groups}
        self.sampling = {
            field.name: np.full(field.shape(entries), field.off, field.dtype) for field in FIELDS
        }

    def update(
        self,
        sequences: Sequence[int],
        sampling: Sequence[RequestSampling],
        allocator: PageAllocator,
    ) -> np.ndarray:
        """Updates the rows of some sequences; returns the indices of the rows, int64, which the caller must not change.

        If the sequences are those of the last call, only rows whose pages have changed since are looked at.

        Args:
            sequences: their numbers in the allocator.
            sampling: their sampling parameters; a row is rewritten when `params` is another object.
            allocator: holds their pages.

        Raises:
            ValueError: a sequence is not open, has reserved no pages, or has more stop ids than fit.
        """
        all_held = allocator.held_by(sequences)
        changes = [held.changes for held in all_held]
        due: Sequence[int] = range(len(all_held))
        entries = np.zeros(len(all_held), np.int64)
        if all_held == self._last_held and all(map(is_, sampling, self._last_sampling)):
            if changes == self._last_changes:
                return self._last_entries
            both = zip(changes, self._last_changes, strict=True)
            due = [row for row, (now, before) in enumerate(both) if now != before]
            entries = self._last_entries.copy()
        self._last_held = []  # An interrupted update is followed by a complete one.
        for row in due:
            held, request = all_held[row], sampling[row]
            entry = held.states["sampling"].write
            known = self._owners[entry] is held and self._params[entry] is request.params
            if not known or self._changes[entry] != changes[row]:
                self._write(entry, held, request)
            if not entry:
                allocator.states(sequences[row], "sampling")  # Raises: it has no entry.
            entries[row] = entry
        self._last_sampling, self._last_changes = sampling, changes
        self._last_held, self._last_entries = all_held, entries
        return entries

    def _write(self, entry: int, held: SequenceView, request: RequestSampling) -> None:
        known = self._owners[entry] is held and self._params[entry] is request.params
        self._owners[entry] = None  # An interrupted write leaves the row without an owner.
        for name, count in self.pages.items():
            pages = held.pages[name]
            table = self._table(name, len(pages))
            table[entry, : len(pages)] = pages
            table[entry, len(pages) :] = 0
            count[entry] = len(pages)
            self.first[name][entry] = held.unneeded[name] * self._page_sizes[name]
            self.covered[name][entry] = held.covered.get(name, 0)
        if not known:
            self._write_sampling(entry, request)
        self._changes[entry] = held.changes
        self._owners[entry] = held

    def _write_sampling(self, entry: int, request: RequestSampling) -> None:
        for field in FIELDS:
            field.write(self.sampling[field.name], entry, request)
        self._params[entry] = request.params

    def _table(self, name: str, width: int) -> np.ndarray:
        """Returns a group's page table, grown to at least `width`."""
        table = self.tables[name]
        if width > table.shape[1]:
            wider = np.zeros((len(table), max(width, 2 * table.shape[1])), np.int32)
            wider[:, : table.shape[1]] = table
            table = self.tables[name] = wider
        return table

"""A persistent table of what steps need of each sequence: its page tables and its sampling parameters.

A step gathers its rows from the table by index, so its cost hardly grows with the number of rows. A row is written when
its sequence first runs and whenever its pages changed. vLLM calls the same idea a persistent batch.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxkv.cache.page_allocator import PageAllocator, SequenceView
from jaxkv.cache.spec import CacheLayout
from jaxkv.sampling.fields import FIELDS, Choice

_FEWEST_PAGES = 16


class RowTable:
    """The rows of all sequences that may run; the row of a sequence is its entry in the sampling group.

    Args:
        layout: the cache's groups.
        counts: pages or states of each group.

    Attributes:
        tables: paged group's name -> pages, int32 [entries, width], 0 past a row's end; wide enough for all so far.
        pages: paged group's name -> how many pages a row has, int32 [entries].
        first: paged group's name -> tokens before a row's first page, which its window has passed, int32 [entries].
        covered: paged group's name -> tokens in shared pages, which are not written, int32 [entries].
        choices: field -> how the row chooses its tokens, [entries] or [entries, width].
    """

    def __init__(self, layout: CacheLayout, counts: Mapping[str, int]) -> None:
        entries = counts["sampling"]
        names = [group.name for group in layout.paged_groups]
        self._owners: list[SequenceView | None] = [None] * entries
        self._changes = [0] * entries
        self._params: list[object] = [None] * entries
        self.tables: dict[str, np.ndarray] = {
            name: np.zeros((entries, _FEWEST_PAGES), np.int32) for name in names
        }
        self.pages = {name: np.zeros(entries, np.int32) for name in names}
        self.first = {name: np.zeros(entries, np.int32) for name in names}
        self.covered = {name: np.zeros(entries, np.int32) for name in names}
        self._page_sizes = {group.name: group.page_size for group in layout.paged_groups}
        self.choices = {
            field.name: np.full(field.shape(entries), field.off, field.dtype) for field in FIELDS
        }

    def find(
        self, sequences: Sequence[int], choices: Sequence[Choice], allocator: PageAllocator
    ) -> np.ndarray:
        """Returns the rows of some sequences as indices, int64, after bringing them up to date.

        Args:
            sequences: their numbers in the allocator.
            choices: how each chooses its tokens; the row is written anew when `params` is another object.
            allocator: holds their pages.

        Raises:
            ValueError: one is not open or has reserved nothing, or has more stop ids than fit.
        """
        owners, changes, seen = self._owners, self._changes, self._params
        everything = allocator.held_by(sequences)
        entries = [held.states["sampling"].write for held in everything]
        for entry, held, choice in zip(entries, everything, choices, strict=True):
            known = owners[entry] is held and seen[entry] is choice.params
            if not known or changes[entry] != held.changes:
                self._write(entry, held, choice)
        if 0 in entries:
            allocator.states(sequences[entries.index(0)], "sampling")  # Raises: it has none.
        return np.asarray(entries, np.int64)

    def _write(self, entry: int, held: SequenceView, choice: Choice) -> None:
        known = self._owners[entry] is held and self._params[entry] is choice.params
        self._owners[entry] = None  # Until all is written, whatever happens.
        for name, count in self.pages.items():
            pages = held.pages[name]
            table = self._table(name, len(pages))
            table[entry, : len(pages)] = pages
            table[entry, len(pages) :] = 0
            count[entry] = len(pages)
            self.first[name][entry] = held.unneeded[name] * self._page_sizes[name]
            self.covered[name][entry] = held.covered.get(name, 0)
        if not known:
            self._choose(entry, choice)
        self._changes[entry] = held.changes
        self._owners[entry] = held

    def _choose(self, entry: int, choice: Choice) -> None:
        for field in FIELDS:
            field.write(self.choices[field.name], entry, choice)
        self._params[entry] = choice.params

    def _table(self, name: str, width: int) -> np.ndarray:
        """Returns a group's table, at least so wide."""
        table = self.tables[name]
        if width > table.shape[1]:
            wider = np.zeros((len(table), max(width, 2 * table.shape[1])), np.int32)
            wider[:, : table.shape[1]] = table
            table = self.tables[name] = wider
        return table

"""Host bookkeeping of a batch's rows: the tokens of each row, its columns, and its pages and states.

A row's padding takes columns of the batch, but no slots of the cache.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from jaxkv.cache.kept_pages.keys import PageKeys
from jaxkv.cache.page_allocator import PageCopy
from jaxkv.cache.spec import PagedSpec
from jaxkv.errors import CachePoisoned, OutOfPages, OutOfStates
from torch_bridge.sharing.leases import Lease
from torch_bridge.transformers_cache.store import Store


@dataclass
class Sequence:
    """One row.

    Attributes:
        number: its id in the allocator.
        text: its token ids, as far as they were read from the device; `None` once they do not determine its keys.
        keys: the hash keys of its pages in the prefix index; `None` without a text.
        num_tokens: its tokens without padding, those of the current step included.
        num_crops: how often tokens were taken back, after which other pages may follow the same number of tokens.
    """

    number: int
    text: list[int] | None
    keys: PageKeys | None
    num_tokens: int = 0
    num_crops: int = 0

    def crop(self, num_tokens: int) -> None:
        """Takes back the tokens from `num_tokens` on; the allocator has done so."""
        if num_tokens == self.num_tokens:
            return
        self.num_tokens = num_tokens
        self.num_crops += 1
        if self.text is not None:
            del self.text[num_tokens:]
        if self.keys is not None:
            self.keys.truncate(num_tokens)


@dataclass
class Unread:
    """Token ids of one step that were not yet copied to the host.

    Attributes:
        ids: [rows, queries]; `None` if they do not determine the keys.
        positions: [rows or 1, queries], or `None` where Transformers counts columns.
        real: bool [rows, queries], which columns hold tokens.
        first_column: column of the first query.
    """

    ids: torch.Tensor | None
    positions: torch.Tensor | None
    real: np.ndarray
    first_column: int

    def own(self) -> "Unread":
        """Returns a copy with cloned tensors, since callers write their next tokens into the same tensors."""
        ids, positions = (one if one is None else one.clone() for one in (self.ids, self.positions))
        return replace(self, ids=ids, positions=positions)

    def up_to(self, column: int) -> "Unread":
        """Returns the part before a column of the batch."""
        count = max(0, min(column - self.first_column, self.real.shape[1]))
        ids, positions = (
            one if one is None else one[..., :count] for one in (self.ids, self.positions)
        )
        return replace(self, ids=ids, positions=positions, real=self.real[:, :count])


@dataclass
class Sequences:
    """All rows of one cache.

    Attributes:
        store: the pool that holds their pages and states.
        rows: the rows in the batch's order; empty before the first forward.
        real: bool [rows, columns], which columns hold tokens.
        rebuilds: the owner's `rebuilds` when the rows began. If the owner's has grown since, the rows' pages are lost.
    """

    store: Store
    rows: list[Sequence] = field(default_factory=list)
    real: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))
    rebuilds: int = 0
    _unread: list[Unread] = field(default_factory=list)
    _fresh: bool = False

    @property
    def has_pages(self) -> bool:
        """Whether a layer attends."""
        return bool(self.store.layout.paged_groups)

    @property
    def has_states(self) -> bool:
        """Whether a layer is recurrent."""
        return bool(self.store.layout.state_groups)

    @property
    def has_windows(self) -> bool:
        """Whether a layer attends to a window."""
        groups = self.store.layout.paged_groups
        return any(isinstance(one.spec, PagedSpec) and one.spec.window for one in groups)

    @property
    def num_columns(self) -> int:
        """Number of cached columns, padding included."""
        return self.real.shape[1]

    def open_rows(self, texts: list[list[int] | None], real: np.ndarray, most_columns: int) -> int:
        """Opens a row for each text and returns how many leading columns the prefix index holds.

        Columns are left out for all rows at once, so the row with the shortest hit decides.

        Args:
            texts: the token ids of each row; `None` where they do not determine the keys.
            real: bool [rows, columns], which columns hold tokens.
            most_columns: upper bound of the result.
        """
        index = self.store.index
        if self.has_states and not real.all():
            # Padding goes through the layers too, and what a convolution keeps of it is not zero where inputs have a
            # bias.
            most_columns = 0
        keys = [None if text is None else index.keys() for text in texts]
        counted = real.cumsum(axis=1)
        columns = self._held_columns(texts, keys, counted, most_columns)
        self.rebuilds = self.store.owner.rebuilds
        for text, key, count in zip(texts, keys, counted, strict=True):
            number, length = self.store.new_number(), int(count[columns - 1]) if columns else 0
            if text is None or key is None:
                self.store.allocator.open(number)
            else:
                index.adopt(number, text, key, most=length)
            self.rows.append(Sequence(number, text, key, length))
        self.real = real[:, :columns]
        self._fresh = True
        return columns

    def are_texts(
        self, real: np.ndarray, positions: torch.Tensor | None, first_column: int, num_queries: int
    ) -> np.ndarray:
        """Returns, bool [rows], whether a row's tokens alone determine its keys and states; see `usual_positions`.

        Padding changes the states of recurrent layers. Transformers' own attention counts it in windows, so keys behind
        a window depend on padding between tokens.
        """
        usual = usual_positions(real, positions, first_column, num_queries)
        if self.has_windows:
            usual &= ~have_gaps(real[:, : first_column + num_queries])
        if not self.has_states:
            return usual
        return usual & real[:, first_column : first_column + num_queries].all(axis=1)

    def _held_columns(
        self,
        texts: list[list[int] | None],
        keys: list[PageKeys | None],
        counted: np.ndarray,
        columns: int,
    ) -> int:
        """Returns the largest number of leading columns, up to `columns`, that the index holds for every row."""
        while columns:
            shorter = columns
            for text, key, count in zip(texts, keys, counted, strict=True):
                length, hit = int(count[columns - 1]), 0
                if text and key is not None:
                    hit = self.store.index.match(text, key, most=length).num_tokens
                if hit < length:
                    shorter = min(shorter, int(np.searchsorted(count, hit, side="right")))
            if shorter == columns:
                break
            columns = shorter
        return columns

    def grow(self, real: np.ndarray, lease: Lease) -> None:
        """Appends columns, reserves pages and states for their tokens, and copies the shared pages they write to.

        Args:
            real: bool [rows, queries], which of the new columns hold tokens.
            lease: a write lease of the pool, for the copies.

        Raises:
            OutOfPages: the pool is too small (`OutOfStates` for states). Rows that began with these columns are
                dropped; rows that existed before are unchanged.
        """
        copies: list[PageCopy] = []
        new = real.sum(axis=1)
        try:
            for row, count in zip(self.rows, new.tolist(), strict=True):
                end = row.num_tokens + count
                if not self.store.allocator.extend(row.number, end):
                    copies += self.store.allocator.reserve(row.number, end).copies
        except (OutOfPages, OutOfStates) as error:
            size = "max_tokens" if isinstance(error, OutOfPages) else "max_sequences"
            others = self.store.allocator.open_sequences - {row.number for row in self.rows}
            if self._fresh:
                self.release()
            else:
                # The rows before the failing one hold their new pages: copies of shared ones are kept, others freed.
                self.store.copy(lease, copies)
                self.store.allocator.truncate({row.number: row.num_tokens for row in self.rows})
            raise type(error)(
                f"{error}. This forward has {int(new.sum())} new tokens in {len(new)} rows; give JaxkvCache a larger "
                f"{size}{', or reset() forks that are done' if others else ''}"
            ) from error
        self.store.copy(lease, copies)
        for row, count in zip(self.rows, new, strict=True):
            row.num_tokens += int(count)
        self.real = np.concatenate([self.real, real], axis=1)

    def commit(self, unread: Unread) -> None:
        """Marks the step's tokens as computed, and keeps their ids on the device until `publish` reads them."""
        self.store.allocator.commit_all((row.number, row.num_tokens) for row in self.rows)
        if self.has_states:
            for row, is_real in zip(self.rows, unread.real, strict=True):
                if not is_real.any():
                    self.store.allocator.commit_states(row.number)
        if not self._fresh:
            self._unread.append(unread.own())
            return
        self._fresh = False
        self.publish()

    def publish(self) -> None:
        """Reads the token ids that are still on the device, and adds full pages to the prefix index."""
        for unread in self._unread:
            self._read(unread)
        self._unread.clear()
        for row in self.rows:
            if row.text is not None and row.keys is not None:
                computed = min(len(row.text), self.store.allocator.num_tokens(row.number))
                self.store.index.publish(row.number, row.text, row.keys, computed)

    def keep_states(self, lease: Lease) -> None:
        """Keeps the rows' states in the prefix index, where texts that continue theirs begin later.

        Args:
            lease: a write lease of the pool, for copies of pages that are not full.
        """
        if not self.has_states:
            return
        self.publish()
        index = self.store.index
        for row in self.rows:
            if not row.text or row.keys is None or len(row.text) != row.num_tokens:
                continue
            # Copied one by one: room for one checkpoint may be made by dropping the one before it.
            copies = index.store_checkpoint(
                row.number, row.text, row.keys, row.num_tokens, current=True
            )
            self.store.copy(lease, copies)

    def fork(self) -> "Sequences":
        """Returns copies of these rows; pages are shared until one of the rows writes to them."""
        self.check()
        self.publish()
        child = Sequences(self.store, rebuilds=self.rebuilds, real=self.real)
        child.rows += [self._fork_row(row) for row in self.rows]
        return child

    def reorder(self, order: list[int]) -> None:
        """Makes row i a continuation of the current row `order[i]`; does nothing before the first forward.

        Raises:
            ValueError: an index is out of range, or `order` is empty.
        """
        if not self.rows or order == list(range(len(self.rows))):
            return
        if not order or any(not 0 <= index < len(self.rows) for index in order):
            raise ValueError(
                f"rows must be chosen by numbers from 0 to {len(self.rows) - 1}, at least one, got {order}"
                f"{'' if order else '; reset() drops all rows'}"
            )
        self.check()
        self.publish()
        # The first row that continues another is that row itself; only the others are forks.
        chosen: set[int] = set()
        rows = []
        for index in order:
            rows.append(self._fork_row(self.rows[index]) if index in chosen else self.rows[index])
            chosen.add(index)
        for index, row in enumerate(self.rows):
            if index not in chosen:
                self.store.allocator.release(row.number)
        self.rows, self.real = rows, self.real[order]

    def _fork_row(self, row: Sequence) -> Sequence:
        number = self.store.new_number()
        self.store.allocator.fork(row.number, number)
        text = None if row.text is None else list(row.text)
        return Sequence(number, text, row.keys and row.keys.copy(), row.num_tokens)

    def crop(self, count: int) -> None:
        """Takes back the last `count` columns of all rows, and frees the pages that hold no other token.

        Raises:
            ValueError: a row has a recurrent state, or needs pages of a window that it has never held.
        """
        self.check()
        allocator, columns = self.store.allocator, max(0, self.num_columns - count)
        if columns == self.num_columns:
            return
        left = self.real[:, :columns]
        lengths = left.sum(axis=1).tolist()
        allocator.truncate({row.number: n for row, n in zip(self.rows, lengths, strict=True)})
        for row, length in zip(self.rows, lengths, strict=True):
            row.crop(length)
        self.real = left
        parts = [one.up_to(columns) for one in self._unread if one.first_column < columns]
        self._unread[:] = parts

    def release(self) -> None:
        """Ends all rows and frees their pages, except those that the prefix index keeps."""
        for row in self.rows:
            if self.store.allocator.is_open(row.number):
                self.store.allocator.release(row.number)
        self.rows = []
        self.real = np.zeros((0, 0), bool)
        self._unread.clear()

    def check(self) -> None:
        """Raises `CachePoisoned` if the pool was lost, or was replaced since the rows began."""
        if self.store.owner.poisoned or (self.rows and self.store.owner.rebuilds != self.rebuilds):
            raise CachePoisoned(
                "the contents of this cache are lost: a forward failed, here or in a fork, after its first write. "
                "Call reset() and compute the sequences again"
            ) from self.store.owner.cause

    def _read(self, unread: Unread) -> None:
        """Adds one step's tokens to the rows' texts; a row at unusual positions loses its text."""
        if unread.ids is None:
            for row in self.rows:
                row.text = None
            return
        ids = unread.ids.to("cpu").numpy()
        usual = self.are_texts(self.real, unread.positions, unread.first_column, ids.shape[1])
        for row, tokens, real, fits in zip(self.rows, ids, unread.real, usual, strict=True):
            if row.text is not None:
                row.text = [*row.text, *tokens[real].tolist()] if fits else None


def have_gaps(real: np.ndarray) -> np.ndarray:
    """Returns, bool [rows], whether padding stands between two tokens of a row.

    Args:
        real: bool [rows, columns], which columns hold tokens.
    """
    # Each piece of tokens begins once.
    begins = real[:, 1:] & ~real[:, :-1]
    return begins.sum(axis=1) + real[:, 0] > 1


def usual_positions(
    real: np.ndarray, positions: torch.Tensor | None, first_column: int, num_queries: int
) -> np.ndarray:
    """Returns, bool [rows], whether the i-th token of a row is at position i, for the tokens of some columns.

    Args:
        real: bool [rows, columns], which columns hold tokens, from column 0.
        positions: [rows or 1, queries]; `None` where each column's number is its position.
        first_column: first column to check.
        num_queries: number of columns to check.
    """
    stop = first_column + num_queries
    expected = (real[:, :stop].cumsum(axis=1) - 1)[:, first_column:]
    if positions is None:
        given = np.arange(first_column, stop)[None]
    elif positions.ndim == 2:
        given = positions.to("cpu").numpy()
    else:  # Several coordinates per token, as in vision models.
        return np.zeros(len(real), bool)
    return np.where(real[:, first_column:stop], given == expected, True).all(axis=1)

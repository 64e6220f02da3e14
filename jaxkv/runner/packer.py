"""Packs the rows of a step into one int32 and one float32 array, and checks their ids and sizes.

Each step starts from arrays filled with padding, so it cannot read entries of an earlier, longer batch.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxkv.cache.page_allocator import PageAllocator, SequenceView
from jaxkv.cache.spec import Group
from jaxkv.runner.packed_layout import PackedLayout
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.row_table import RowTable
from jaxkv.runner.rows import Row, StepRows, num_masks
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.runner.shared_rows import SharedRows, find_shared
from pallas_kernels.shared_keys import ROWS_PER_TILE


class Packer:
    """Packs the steps of one cache.

    Args:
        packed_layout: layout of the arrays, whose fields have the names and meanings of `StepBatch`.
        vocab_size: token ids must be below it.
    """

    def __init__(self, packed_layout: PackedLayout, vocab_size: int) -> None:
        layout = packed_layout.layout
        self.packed_layout = packed_layout
        self.counts = packed_layout.counts
        self.vocab_size = vocab_size
        self._paged, self._recurrent = layout.paged_groups, layout.state_groups
        self._keeps_outputs = layout.keeps_outputs
        self._row_table = RowTable(layout, self.counts)
        self._shared_group = layout.shared_group
        # What the last call of `shared_rows` found, and for which sequences.
        self._sharing: tuple[list[SequenceView], SharedRows | None] = [], None

    def pack(
        self, shape: StepSpec, rows: StepRows | Sequence[Row], allocator: PageAllocator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the int32 and the float32 array of a step.

        Args:
            shape: the spec of the program.
            rows: the rows.
            allocator: holds their pages and states.

        Raises:
            ValueError: the rows do not fit the shape or their pages, or a token id is not in the vocabulary.
        """
        if not isinstance(rows, StepRows):
            rows = StepRows.of(rows)
        self._check(shape, rows)
        places, float_places = self.packed_layout.arrangements(shape)
        ints, floats = places.blank.copy(), float_places.blank.copy()
        entries = self._row_table.update(rows.sequences, rows.sampling, allocator)
        count, num_tokens = len(entries), len(rows.tokens)
        tokens, starts = _ints(rows.tokens), _ints(rows.starts)
        self._check_values(tokens, starts)
        if num_tokens == count and min(rows.lens) == 1:
            owner, bounds = np.arange(count), np.arange(count + 1)
            positions, seq_lens = starts, starts + 1
        else:
            lens = _ints(rows.lens)
            owner, bounds = np.repeat(np.arange(count), lens), np.concatenate([[0], lens.cumsum()])
            positions, seq_lens = (
                np.arange(num_tokens) + (starts - bounds[:-1])[owner],
                starts + lens,
            )
        fields = places.split(ints)
        fields["tokens"][:num_tokens] = tokens
        fields["positions"][:num_tokens] = positions
        fields["cu_q_lens"][:] = num_tokens
        fields["cu_q_lens"][: count + 1] = bounds
        fields["seq_lens"][:count] = seq_lens
        fields["carry"][:count] = rows.carry
        emits = np.asarray(rows.emits, bool)
        np.copyto(fields["sampling_states"][:count], entries, where=emits, casting="same_kind")
        last_lens = seq_lens
        if shape.steps > 1:
            fields["left"][:count] = rows.left
            last_lens = seq_lens + _ints(rows.left) - 1
        if rows.drafts:
            fields["drafts"][:count] = rows.drafts
        for group in self._paged:
            self._fill_pages(group, fields, rows, starts, entries, owner, positions, last_lens)
        if shape.shares:
            self._fill_shared(fields, self.shared_rows(rows.sequences, rows.starts, allocator))
        self._fill_states(fields, rows, allocator, bounds)
        self._fill_sampling(fields | float_places.split(floats), rows, entries)
        return ints, floats

    def shared_rows(
        self, sequences: Sequence[int], starts: Sequence[int], allocator: PageAllocator
    ) -> SharedRows | None:
        """Returns which rows of a decode step begin with the same pages; `None` if too few do.

        It looks for them when the sequences, or their order, are not those of the last call: full pages of a sequence
        stay what they are while it generates.

        Args:
            sequences: their numbers in the allocator.
            starts: the position of each one's new token.
            allocator: holds their pages.
        """
        group = self._shared_group
        if group is None:
            return None
        held = allocator.held_by(sequences)
        if held != self._sharing[0]:
            pages = [one.pages[group.name] for one in held]
            token_bytes = sum(array.nbytes for array in group.spec.arrays)
            found = find_shared(pages, starts, page_size=group.page_size, token_bytes=token_bytes)
            self._sharing = held, found
        return self._sharing[1]

    def pack_sampling(
        self, spec: SampleSpec, rows: StepRows, allocator: PageAllocator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the int32 and the float32 array of a program that samples, whose masks are packed later.

        Args:
            spec: the spec of the program; the number of its masks does not matter.
            rows: the rows of the step.
            allocator: holds their pages and states.
        """
        places, float_places = self.packed_layout.arrangements(spec)
        ints, floats = places.blank.copy(), float_places.blank.copy()
        fields = places.split(ints)
        entries = self._row_table.update(rows.sequences, rows.sampling, allocator)
        fields["seq_lens"][: len(entries)] = np.add(rows.starts, rows.lens)
        emits = np.asarray(rows.emits, bool)
        states = fields["sampling_states"][: len(entries)]
        np.copyto(states, entries, where=emits, casting="same_kind")
        self._fill_sampling(fields | float_places.split(floats), rows, entries)
        return ints, floats

    def pack_masks(self, spec: SampleSpec, masks: Sequence[np.ndarray | None]) -> np.ndarray:
        """Returns the int32 array of a program's masks.

        Args:
            spec: the spec of the program.
            masks: see `StepRows.masks`.

        Raises:
            ValueError: the program has no room for them.
        """
        _check_masks(spec, masks)
        places = self.packed_layout.mask_arrangement(spec)
        packed = places.blank.copy()
        fields = places.split(packed)
        _fill_masks(fields["token_masks"].view(np.uint32), fields["mask_of_row"], masks)
        return packed

    def _check(self, shape: StepSpec, rows: StepRows) -> None:
        """Raises `ValueError` if the program has no room for the rows."""
        lens, num_tokens = rows.lens, len(rows.tokens)
        if len(lens) > shape.rows or num_tokens > shape.tokens:
            raise ValueError(
                f"a step of {len(lens)} rows and {num_tokens} tokens does not fit a program of "
                f"{shape.rows} rows and {shape.tokens} tokens; choose a larger bucket"
            )
        least = 0 if self._keeps_outputs and not shape.decode else 1
        if not lens or min(lens) < least or (shape.decode and max(lens) > 1):
            wanted = "exactly one new token" if shape.decode else "one or more new tokens"
            raise ValueError(
                f"each row of a step needs {wanted}, got rows of {lens} token ids; leave out empty rows, or use a "
                f"prefill program for several tokens"
            )
        if shape.fresh and any(rows.starts):
            raise ValueError(
                f"a fresh program needs rows that begin at their first token, got rows that start at {rows.starts}; "
                f"use a program that reads the cache"
            )
        if shape.steps > 1 and not (
            len(rows.left) == len(lens) and 1 <= min(rows.left) <= max(rows.left) <= shape.steps
        ):
            raise ValueError(
                f"a program of {shape.steps} steps needs rows that take part in 1 to {shape.steps} of them, "
                f"got {rows.left} for {len(lens)} rows"
            )
        if rows.drafts:
            self._check_drafts(shape, rows)
        _check_masks(shape, rows.masks)
        if len(rows.pending_checkpoints) > shape.pending_checkpoints:
            raise ValueError(
                f"a step with {len(rows.pending_checkpoints)} pending checkpoints does not fit a program of "
                f"{shape.pending_checkpoints}; make fewer, or choose a larger program"
            )

    def _check_drafts(self, shape: StepSpec, rows: StepRows) -> None:
        """Raises `ValueError` if the program does not verify the rows' drafts."""
        fits = len(rows.drafts) == len(rows.lens) and all(
            0 <= drafts <= min(shape.drafts, length - 1)
            for drafts, length in zip(rows.drafts, rows.lens, strict=True)
        )
        if not fits:
            raise ValueError(
                f"a program that verifies {shape.drafts} drafts needs rows with up to that many, behind one token "
                f"each, got {rows.drafts} drafts in rows of {rows.lens} tokens"
            )

    def _check_values(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Raises `ValueError` if a token id is not in the vocabulary or a position is negative."""
        least, most = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
        if least < 0 or most >= self.vocab_size:
            raise ValueError(f"token ids must lie in [0, {self.vocab_size}), got {least} to {most}")
        if starts.min() < 0:
            raise ValueError(
                f"positions must be at least 0, got a row that starts at {starts.min()}"
            )

    def _fill_pages(
        self,
        group: Group,
        fields: Mapping[str, np.ndarray],
        rows: StepRows,
        starts: np.ndarray,
        entries: np.ndarray,
        owner: np.ndarray,
        positions: np.ndarray,
        seq_lens: np.ndarray,
    ) -> None:
        """Fills one group's page table and the write slot of each new token.

        Tokens that a shared page holds already get slots past the end, so that they are not written.

        Args:
            group: the paged group.
            fields: the int32 fields.
            rows: the rows.
            starts: per row, the position of its first new token.
            entries: per row, its index in the row table.
            owner: per new token, its row.
            positions: per new token, its position.
            seq_lens: per row, tokens that its pages must hold.

        Raises:
            ValueError: a row holds too few pages, more than the table is wide, or has freed pages that it needs.
        """
        name, size = group.name, group.page_size
        table, pages = self._row_table.tables[name], self._row_table.pages[name][entries]
        target = fields[f"{name}.page_table"]
        width = target.shape[1]
        if pages.max() > width:
            row = int(pages.argmax())
            raise ValueError(
                f"sequence {rows.sequences[row]} holds {pages[row]} pages of group {name}, but the "
                f"program's table has {width}; choose a wider bucket"
            )
        lacking = seq_lens > pages * size
        if lacking.any():
            row = int(lacking.argmax())
            raise ValueError(
                f"sequence {rows.sequences[row]} has {pages[row]} pages of {size} tokens in "
                f"{name}, which do not hold {seq_lens[row]} tokens; reserve pages first"
            )
        lost = starts < self._row_table.first[name][entries]
        if lost.any():
            row = int(lost.argmax())
            raise ValueError(
                f"sequence {rows.sequences[row]} starts at position {rows.starts[row]}, but its pages of {name} "
                f"before position {self._row_table.first[name][entries[row]]} were freed; restart the sequence"
            )
        used = int(pages.max())
        target[: len(entries), :used] = table[entries, :used]
        page, offset = np.divmod(positions, size)
        slots = table[entries[owner], page] * size + offset
        covered = self._row_table.covered[name][entries]
        if covered.any():
            nowhere = self.counts[name] * size + np.arange(len(positions))
            slots = np.where(positions < covered[owner], nowhere, slots)
        fields[f"{name}.write_slots"][: len(positions)] = slots

    def _fill_shared(self, fields: Mapping[str, np.ndarray], shared: SharedRows | None) -> None:
        """Fills the rows that begin with the same pages.

        Raises:
            ValueError: their page tables differ; the device would read another row's keys.
        """
        if shared is None:
            return
        assert self._shared_group is not None, "without it nothing is shared"
        rows, places = shared.rows, shared.places
        of_place = fields["shared_rows"]
        of_place[places] = rows
        lens = shared.lens[places // ROWS_PER_TILE]
        firsts = of_place[places // ROWS_PER_TILE * ROWS_PER_TILE]
        pages = lens // self._shared_group.page_size
        table = fields[f"{self._shared_group.name}.page_table"][:, : pages.max()]
        is_shared = np.arange(table.shape[1]) < pages[:, None]
        wrong = ((table[rows] != table[firsts]) & is_shared).any(1)
        wrong |= fields["seq_lens"][rows] <= lens
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"row {rows[at]} of a step does not begin with the same {lens[at]} tokens as row {firsts[at]}, so "
                f"their keys must not be read together; this is an error in the records of pages"
            )
        fields["shared_places"][rows] = places
        fields["shared_lens"][: len(shared.lens)] = shared.lens

    def _fill_states(
        self,
        fields: Mapping[str, np.ndarray],
        rows: StepRows,
        allocator: PageAllocator,
        bounds: np.ndarray,
    ) -> None:
        """Fills the states that rows read and write, and those of pending checkpoints (the fields `snapshot_*`).

        Args:
            fields: the int32 fields.
            rows: the rows.
            allocator: holds their states.
            bounds: row r's new tokens are `bounds[r]:bounds[r + 1]`.

        Raises:
            ValueError: two rows conflict, see `_refuse_conflicts`.
        """
        kept = rows.pending_checkpoints
        if kept:
            ends = [bounds[row] + length - rows.starts[row] for row, length, _ in kept]
            fields["snapshot_ends"][: len(kept)] = ends
        for group in self._recurrent:
            pairs = [allocator.states(number, group.name) for number in rows.sequences]
            reads, writes = np.asarray(pairs, np.int32).T
            pending = np.asarray([states[group.name] for _, _, states in kept], np.int32)
            _refuse_conflicts(group.name, reads, writes, pending)
            if kept:
                fields[f"{group.name}.snapshot_states"][: len(kept)] = pending
            fields[f"{group.name}.read_states"][: len(pairs)] = reads
            fields[f"{group.name}.write_states"][: len(pairs)] = writes

    def _fill_sampling(
        self, fields: Mapping[str, np.ndarray], rows: StepRows, entries: np.ndarray
    ) -> None:
        """Fills the sampling parameters that the program reads."""
        count = len(entries)
        for name, values in self._row_table.sampling.items():
            if name in fields:
                fields[name][:count] = values[entries]
        if "block_stop" in fields:
            least = [choice.params.min_tokens for choice in rows.sampling]
            target = fields["block_stop"]
            if target.ndim == 1:
                target[:count] = np.less(rows.generated, least)
            else:
                ahead = np.arange(target.shape[1])
                target[:count] = np.less.outer(ahead, np.subtract(least, rows.generated)).T
        if "token_masks" in fields:
            _fill_masks(fields["token_masks"].view(np.uint32), fields["mask_of_row"], rows.masks)
        if "given" in fields:
            for target, tokens in zip(fields["given"], rows.given, strict=False):
                target[: len(tokens)] = tokens


def _check_masks(spec: StepSpec | SampleSpec, masks: Sequence[np.ndarray | None]) -> None:
    """Raises `ValueError` if the program has no room for the masks."""
    count = num_masks(masks)
    if count > spec.masks:
        raise ValueError(
            f"a step with {count} masks does not fit a program of {spec.masks}; choose a program with more"
        )


def _fill_masks(
    target: np.ndarray, mask_of_row: np.ndarray, masks: Sequence[np.ndarray | None]
) -> None:
    """Writes each mask once, and for each row with a mask the index of it."""
    indices: dict[int, int] = {}
    for row, mask in enumerate(masks):
        if mask is not None:
            index = indices.get(id(mask))
            if index is None:
                index = indices[id(mask)] = len(indices)
                target[index] = mask
            mask_of_row[row] = index


def _refuse_conflicts(name: str, reads: np.ndarray, writes: np.ndarray, kept: np.ndarray) -> None:
    """Raises `ValueError` if a row would write a state that another row reads or writes; their order is undefined.

    Args:
        name: the group's name, for the message.
        reads: per row, the state that it reads.
        writes: per row, the state that it writes.
        kept: the states of pending checkpoints, which are written too.
    """
    moved = reads != writes
    written = np.concatenate([writes, kept])
    crossed = [*np.intersect1d(reads[moved], writes), *np.intersect1d(reads, kept)]
    if crossed or np.unique(written).size < written.size:
        raise ValueError(
            f"in group {name!r}, rows read the states {reads.tolist()}, write {writes.tolist()} and keep "
            f"{kept.tolist()}: a step must not read a state that another row writes, nor write a state twice"
        )


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int64)

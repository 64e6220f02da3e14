"""Packs the rows of a step into one int32 and one float32 array.

Each field is written fresh for every step, so nothing of an earlier, longer batch can be read again. The packer
checks ids and widths; it decides nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import Group
from jaxkv.runner.packed_layout import PackedLayout
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.row_table import RowTable
from jaxkv.runner.rows import Row, StepRows


class Packer:
    """Packs the steps of one cache.

    Args:
        packed_layout: where each field lies.
        vocab_size: token ids lie below it.
    """

    def __init__(self, packed_layout: PackedLayout, vocab_size: int) -> None:
        layout = packed_layout.layout
        self.packed_layout = packed_layout
        self.counts = packed_layout.counts
        self.vocab_size = vocab_size
        self._paged, self._recurrent = layout.paged_groups, layout.state_groups
        self._recalls = layout.keeps_outputs
        self._row_table = RowTable(layout, self.counts)

    def pack(
        self, shape: StepSpec, rows: StepRows | Sequence[Row], allocator: PageAllocator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the int32 and the float32 array of a step.

        Raises:
            ValueError: the rows exceed the shape or their pages, or a token id is not one of the model's.
        """
        if not isinstance(rows, StepRows):
            rows = StepRows.of(rows)
        self._check(shape, rows)
        places, float_places = self.packed_layout.arrangements(shape)
        ints, floats = places.blank.copy(), float_places.blank.copy()
        entries = self._row_table.find(rows.sequences, rows.choices, allocator)
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
        np.copyto(fields["slots"][:count], entries, where=rows.emits, casting="same_kind")
        last_lens = seq_lens
        if shape.steps > 1:
            fields["left"][:count] = rows.left
            last_lens = seq_lens + _ints(rows.left) - 1
        for group in self._paged:
            self._fill_pages(group, fields, rows, entries, owner, positions, last_lens)
        self._fill_states(fields, rows, allocator, bounds)
        self._fill_choices(fields | float_places.split(floats), rows, entries)
        return ints, floats

    def _check(self, shape: StepSpec, rows: StepRows) -> None:
        """Refuses what the program has no room for."""
        lens, num_tokens = rows.lens, len(rows.tokens)
        if len(lens) > shape.rows or num_tokens > shape.tokens:
            raise ValueError(
                f"a step of {len(lens)} rows and {num_tokens} tokens does not fit a program of "
                f"{shape.rows} rows and {shape.tokens} tokens; choose a larger bucket"
            )
        least = 0 if self._recalls and not shape.decode else 1
        if not lens or min(lens) < least or (shape.decode and max(lens) > 1):
            wanted = "exactly one" if shape.decode else "at least one"
            raise ValueError(f"a step needs rows of {wanted} new token ids, got {lens}")
        if shape.fresh and any(rows.starts):
            raise ValueError(
                f"a program for rows that begin at their first token got rows that begin at {rows.starts}"
            )
        if shape.steps > 1 and not (
            len(rows.left) == len(lens) and 1 <= min(rows.left) <= max(rows.left) <= shape.steps
        ):
            raise ValueError(
                f"a program of {shape.steps} steps needs rows that take part in 1 to {shape.steps} of them, "
                f"got {rows.left} for {len(lens)} rows"
            )
        if len(rows.snapshots) > shape.snapshots:
            raise ValueError(
                f"a step that keeps {len(rows.snapshots)} states does not fit a program that keeps {shape.snapshots}"
            )

    def _check_values(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        least, most = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
        if least < 0 or most >= self.vocab_size:
            raise ValueError(f"token ids must lie in [0, {self.vocab_size}), got {least} to {most}")
        if starts.min() < 0:
            raise ValueError(f"positions count from 0, but a row starts at {starts.min()}")

    def _fill_pages(
        self,
        group: Group,
        fields: Mapping[str, np.ndarray],
        rows: StepRows,
        entries: np.ndarray,
        owner: np.ndarray,
        positions: np.ndarray,
        seq_lens: np.ndarray,
    ) -> None:
        """Fills one group's page table and the slot of each new token; pages must hold `seq_lens` tokens."""
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
                f"{name}, which do not hold {seq_lens[row]} tokens; reserve first"
            )
        lost = np.less(rows.starts, self._row_table.first[name][entries])
        if lost.any():
            row = int(lost.argmax())
            raise ValueError(
                f"sequence {rows.sequences[row]} starts at position {rows.starts[row]}, but its pages of {name} "
                f"before position {self._row_table.first[name][entries[row]]} were given back; begin it anew"
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

    def _fill_states(
        self,
        fields: Mapping[str, np.ndarray],
        rows: StepRows,
        allocator: PageAllocator,
        bounds: np.ndarray,
    ) -> None:
        kept = rows.snapshots
        if kept:
            ends = [bounds[row] + length - rows.starts[row] for row, length, _ in kept]
            fields["snapshot_ends"][: len(kept)] = ends
        for group in self._recurrent:
            pairs = [allocator.states(number, group.name) for number in rows.sequences]
            reads, writes = np.asarray(pairs, np.int32).T
            aside = np.asarray([states[group.name] for _, _, states in kept], np.int32)
            _refuse_crossed(group.name, reads, writes, aside)
            if kept:
                fields[f"{group.name}.snapshot_states"][: len(kept)] = aside
            fields[f"{group.name}.read_states"][: len(pairs)] = reads
            fields[f"{group.name}.write_states"][: len(pairs)] = writes

    def _fill_choices(
        self, fields: Mapping[str, np.ndarray], rows: StepRows, entries: np.ndarray
    ) -> None:
        """Fills those fields that say how tokens are chosen, as far as the program has them."""
        count = len(entries)
        for name, values in self._row_table.choices.items():
            if name in fields:
                fields[name][:count] = values[entries]
        if "block_stop" in fields:
            least = [choice.params.min_tokens for choice in rows.choices]
            fields["block_stop"][:count] = np.less(rows.generated, least)


def _refuse_crossed(name: str, reads: np.ndarray, writes: np.ndarray, kept: np.ndarray) -> None:
    """Raises if a row would write the state that another row reads: which comes first, nobody says."""
    moved = reads != writes
    written = np.concatenate([writes, kept])
    crossed = [*np.intersect1d(reads[moved], writes), *np.intersect1d(reads, kept)]
    if crossed or np.unique(written).size < written.size:
        raise ValueError(
            f"in group {name!r}, rows read the states {reads.tolist()}, write {writes.tolist()} and keep "
            f"{kept.tolist()}: a step may not read what another of its rows writes, nor write a state twice"
        )


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int64)

"""Turns what the host knows about a step into one int32 and one float32 array, and back into names in the trace.

Each field is written fresh for every step, so nothing of an earlier, longer batch can be read again. The packer
checks ids and widths; it decides nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.batch import PagedTables, SamplingBatch, StateTables, StepBatch
from jaxkv.cache.accounts import Accounts
from jaxkv.cache.spec import CacheLayout, Group
from jaxkv.engine.fields import Arrangement, StepShape, float_fields, int_fields
from jaxkv.engine.rows import STOP_WIDTH, Row
from jaxkv.step.loop import Limits


class Packer:
    """Packs steps for one cache layout.

    Args:
        layout: the cache's groups.
        counts: pages or states of each group.
        vocab_size: token ids lie below it.
    """

    def __init__(self, layout: CacheLayout, counts: Mapping[str, int], vocab_size: int) -> None:
        self.layout = layout
        self.counts = dict(counts)
        self.vocab_size = vocab_size
        self._paged, self._recurrent = layout.paged_groups, layout.state_groups
        self._arrangements: dict[StepShape, tuple[Arrangement, Arrangement]] = {}

    def pack(
        self, shape: StepShape, rows: Sequence[Row], accounts: Accounts
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the int32 and the float32 array of a step.

        Raises:
            ValueError: the rows exceed the shape or their pages, or a token id is not one of the model's.
        """
        lens = self._check(shape, rows)
        places, float_places = self.arrangements(shape)
        ints, floats = places.blank.copy(), float_places.blank.copy()
        if shape.decode:
            self._fill_decode(shape, places, ints, rows, accounts)
        else:
            self._fill_ragged(shape, places, ints, rows, lens, accounts)
        places.put(ints, "num_tokens", (sum(lens),))
        places.put(ints, "num_rows", (len(rows),))
        self._fill_states(places, ints, rows, accounts)
        _fill_choices(_INT_CHOICES, places, ints, rows)
        _fill_choices(_FLOAT_CHOICES, float_places, floats, rows)
        if "seed_low" in places.starts:
            _fill_seeds(places, ints, rows)
        if "stop_ids" in places.starts:
            _fill_stop_ids(places, ints, rows)
        return ints, floats

    def arrangements(self, shape: StepShape) -> tuple[Arrangement, Arrangement]:
        """Returns where the int32 and the float32 fields of a shape lie."""
        known = self._arrangements.get(shape)
        if known is None:
            ints = int_fields(self.layout, self.counts, self.vocab_size, shape)
            known = (Arrangement(ints, np.int32), Arrangement(float_fields(shape), np.float32))
            self._arrangements[shape] = known
        return known

    def blank(self, shape: StepShape) -> tuple[np.ndarray, np.ndarray]:
        """Returns the arrays of a step without rows: what a program is compiled for."""
        ints, floats = self.arrangements(shape)
        return ints.blank.copy(), floats.blank.copy()

    def _check(self, shape: StepShape, rows: Sequence[Row]) -> list[int]:
        """Returns how many new tokens each row has, or refuses what the program has no room for."""
        lens = [len(row.tokens) for row in rows]
        if len(rows) > shape.rows or sum(lens) > shape.tokens:
            raise ValueError(
                f"a step of {len(rows)} rows and {sum(lens)} tokens does not fit a program of "
                f"{shape.rows} rows and {shape.tokens} tokens; choose a larger bucket"
            )
        if not rows or min(lens) < 1 or (shape.decode and max(lens) > 1):
            wanted = "exactly one" if shape.decode else "at least one"
            raise ValueError(f"a step needs rows of {wanted} new token ids, got {lens}")
        return lens

    def _check_values(self, least_id: int, most_id: int, first_position: int) -> None:
        if least_id < 0 or most_id >= self.vocab_size:
            raise ValueError(
                f"token ids must lie in [0, {self.vocab_size}), got {least_id} to {most_id}"
            )
        if first_position < 0:
            raise ValueError(f"positions count from 0, but a row starts at {first_position}")

    def _fill_ragged(
        self,
        shape: StepShape,
        places: Arrangement,
        ints: np.ndarray,
        rows: Sequence[Row],
        lens: Sequence[int],
        accounts: Accounts,
    ) -> None:
        """Fills tokens, lengths and tables of rows that have any number of new tokens."""
        fields = places.split(ints)
        tokens = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int64, sum(lens))
        starts = np.asarray([row.start for row in rows], np.int32)
        self._check_values(int(tokens.min()), int(tokens.max()), int(starts.min()))
        bounds = np.asarray([0, *accumulate(lens)], np.int32)
        owner = np.repeat(np.arange(len(rows), dtype=np.int32), lens)
        positions = np.arange(len(tokens), dtype=np.int32) + (starts - bounds[:-1])[owner]
        seq_lens = (starts + np.asarray(lens, np.int32)).tolist()
        places.put(ints, "tokens", tokens)
        places.put(ints, "positions", positions)
        fields["cu_q_lens"][...] = len(tokens)
        places.put(ints, "cu_q_lens", bounds)
        places.put(ints, "seq_lens", seq_lens)
        for group, width in zip(self._paged, shape.table_widths, strict=True):
            self._fill_table(group, width, places, ints, rows, seq_lens, accounts)
            page, offset = np.divmod(positions, np.int32(group.page_size))
            pages = fields[f"{group.name}.page_table"][owner, page]
            places.put(ints, f"{group.name}.write_slots", pages * group.page_size + offset)

    def _fill_decode(
        self,
        shape: StepShape,
        places: Arrangement,
        ints: np.ndarray,
        rows: Sequence[Row],
        accounts: Accounts,
    ) -> None:
        """Writes what `_fill_ragged` writes for rows of one token.

        This is on the path of every decode step, where a few NumPy calls cost more than the loops over rows.
        """
        tokens = [row.tokens[0] for row in rows]
        starts = [row.start for row in rows]
        self._check_values(min(tokens), max(tokens), min(starts))
        seq_lens = [start + 1 for start in starts]
        places.put(ints, "tokens", tokens)
        places.put(ints, "positions", starts)
        places.put(ints, "cu_q_lens", np.minimum(np.arange(shape.rows + 1), len(rows)))
        places.put(ints, "seq_lens", seq_lens)
        for group, width in zip(self._paged, shape.table_widths, strict=True):
            tables = self._fill_table(group, width, places, ints, rows, seq_lens, accounts)
            size, slots = group.page_size, []
            for pages, start in zip(tables, starts, strict=True):
                page, offset = divmod(start, size)
                slots.append(pages[page] * size + offset)
            places.put(ints, f"{group.name}.write_slots", slots)

    def _fill_table(
        self,
        group: Group,
        width: int,
        places: Arrangement,
        ints: np.ndarray,
        rows: Sequence[Row],
        seq_lens: Sequence[int],
        accounts: Accounts,
    ) -> list[Sequence[int]]:
        """Fills one group's page table and returns each row's pages, which are the accounts' own."""
        begin, size = places.starts[f"{group.name}.page_table"], group.page_size
        tables = []
        for row, seq_len in zip(rows, seq_lens, strict=True):
            pages = accounts.pages(row.sequence, group.name)
            if len(pages) > width:
                raise ValueError(
                    f"sequence {row.sequence} holds {len(pages)} pages of group {group.name}, but the "
                    f"program's table has {width}; choose a wider bucket"
                )
            if len(pages) * size < seq_len:
                raise ValueError(
                    f"sequence {row.sequence} has {len(pages)} pages of {size} tokens in "
                    f"{group.name}, which do not hold {seq_len} tokens; reserve first"
                )
            ints[begin : begin + len(pages)] = pages
            begin += width
            tables.append(pages)
        return tables

    def _fill_states(
        self, places: Arrangement, ints: np.ndarray, rows: Sequence[Row], accounts: Accounts
    ) -> None:
        for group in self._recurrent:
            pairs = [accounts.states(row.sequence, group.name) for row in rows]
            places.put(ints, f"{group.name}.read_states", [read for read, _ in pairs])
            places.put(ints, f"{group.name}.write_states", [write for _, write in pairs])
        first = places.starts["slots"]
        for index, row in enumerate(rows):
            if row.emits:
                ints[first + index] = accounts.states(row.sequence, "sampling")[1]

    def unpack(
        self,
        shape: StepShape,
        ints: Int[Array, " packed"],
        floats: Float[Array, " packed_floats"] | None = None,
    ) -> tuple[StepBatch, Limits | None]:
        """Names the fields again, inside the trace; a `loop` program also gets its limits.

        A greedy program has no floats, and may be given none.
        """
        int_places, float_places = self.arrangements(shape)
        fields = int_places.split(ints) | float_places.split(floats)
        paged = tuple(
            PagedTables(
                # Without the barrier XLA hands kernels a slice of the packed array, by a kind of fusion that no
                # command buffer can hold: the step would fall apart into several graphs.
                page_table=lax.optimization_barrier(fields[f"{group.name}.page_table"]),
                write_slots=fields[f"{group.name}.write_slots"],
            )
            for group in self.layout.paged_groups
        )
        states = tuple(
            StateTables(
                read_states=fields[f"{group.name}.read_states"],
                write_states=fields[f"{group.name}.write_states"],
            )
            for group in self.layout.state_groups
        )
        sampling_fields = set(_SAMPLING_FIELDS) - ({"stop_ids"} if shape.loop else set())
        batch = StepBatch(
            **{name: fields[name] for name in _BATCH_FIELDS},
            paged=paged,
            states=states,
            sampling=SamplingBatch(
                **{name: fields[name] for name in sampling_fields if name in fields},
                features=shape.features,
            ),
            decode=shape.decode,
        )
        limits = Limits(**{name: fields[name] for name in _LIMIT_FIELDS}) if shape.loop else None
        return batch, limits


def _fill_choices(
    choices: Mapping[str, Callable[[Row], float]],
    places: Arrangement,
    packed: np.ndarray,
    rows: Sequence[Row],
) -> None:
    for name, choose in choices.items():
        if name in places.starts:
            places.put(packed, name, [choose(row) for row in rows])


def _fill_stop_ids(places: Arrangement, ints: np.ndarray, rows: Sequence[Row]) -> None:
    begin = places.starts["stop_ids"]
    for row in rows:
        if len(row.stop_ids) > STOP_WIDTH:
            raise ValueError(f"at most {STOP_WIDTH} stop ids fit, got {len(row.stop_ids)}")
        ints[begin : begin + len(row.stop_ids)] = row.stop_ids
        begin += STOP_WIDTH


def _fill_seeds(places: Arrangement, ints: np.ndarray, rows: Sequence[Row]) -> None:
    """Writes what `split_seed` returns, for all rows at once."""
    halves = np.asarray([row.seed & 0xFFFFFFFFFFFFFFFF for row in rows], "<u8").view("<i4")
    places.put(ints, "seed_low", halves[::2])
    places.put(ints, "seed_high", halves[1::2])


_INT_CHOICES: Mapping[str, Callable[[Row], int]] = {
    "carry": attrgetter("carry"),
    "top_k": attrgetter("params.top_k"),
    "block_stop": lambda row: row.generated < row.params.min_tokens,
    "max_tokens": attrgetter("max_tokens"),
    "min_tokens": attrgetter("params.min_tokens"),
}
_FLOAT_CHOICES: Mapping[str, Callable[[Row], float]] = {
    "temperature": attrgetter("params.temperature"),
    "top_p": attrgetter("params.top_p"),
    "min_p": attrgetter("params.min_p"),
    "repetition": attrgetter("params.repetition_penalty"),
    "presence": attrgetter("params.presence_penalty"),
    "frequency": attrgetter("params.frequency_penalty"),
}
"""Field -> what a row says for it. Seeds and stop ids are filled by functions of their own."""

_BATCH_FIELDS = ("tokens", "positions", "cu_q_lens", "seq_lens", "num_tokens", "num_rows")
_LIMIT_FIELDS = ("max_tokens", "min_tokens", "stop_ids")
_SAMPLING_FIELDS = (
    "slots",
    "carry",
    "seed_low",
    "seed_high",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition",
    "presence",
    "frequency",
    "stop_ids",
    "block_stop",
)

"""Turns what the host knows about a step into one int32 and one float32 array, and back into names in the trace.

Each field is written fresh for every step, so nothing of an earlier, longer batch can be read again. The packer
checks ids and widths; it decides nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.batch import PagedTables, SamplingBatch, StateTables, StepBatch
from jaxkv.cache.accounts import Accounts
from jaxkv.cache.spec import CacheLayout
from jaxkv.engine.fields import Field, StepShape, float_fields, int_fields, padding, split
from jaxkv.engine.rows import STOP_WIDTH, Row, split_seed
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
        self._blank: dict[StepShape, tuple[np.ndarray, np.ndarray]] = {}

    def pack(
        self, shape: StepShape, rows: Sequence[Row], accounts: Accounts
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the int32 and the float32 array of a step.

        Raises:
            ValueError: the rows exceed the shape, or a token id is not one of the model's.
        """
        self._check(shape, rows)
        packed_ints, packed_floats = (blank.copy() for blank in self._blanks(shape))
        ints = split(packed_ints, self._int_fields(shape))
        floats = split(packed_floats, float_fields(shape))
        self._fill_lengths(ints, rows)
        for group in self.layout.paged_groups:
            self._fill_tables(ints, rows, group.name, accounts)
        for index, row in enumerate(rows):
            for group in self.layout.state_groups:
                read, write = accounts.states(row.sequence, group.name)
                ints[f"{group.name}.read_states"][index] = read
                ints[f"{group.name}.write_states"][index] = write
            if row.emits:
                ints["slots"][index] = accounts.states(row.sequence, "sampling")[1]
            ints["carry"][index] = row.carry
            self._fill_choice(ints, floats, index, row)
        return packed_ints, packed_floats

    def _blanks(self, shape: StepShape) -> tuple[np.ndarray, np.ndarray]:
        """Returns both arrays with nothing but padding; every step starts from a copy of them."""
        if shape not in self._blank:
            self._blank[shape] = (
                padding(self._int_fields(shape), np.int32),
                padding(float_fields(shape), np.float32),
            )
        return self._blank[shape]

    def blank(self, shape: StepShape) -> tuple[np.ndarray, np.ndarray]:
        """Returns the arrays of a step without rows: what a program is compiled for."""
        ints, floats = self._blanks(shape)
        return ints.copy(), floats.copy()

    def _check(self, shape: StepShape, rows: Sequence[Row]) -> None:
        total = sum(len(row.tokens) for row in rows)
        if len(rows) > shape.rows or total > shape.tokens:
            raise ValueError(
                f"a step of {len(rows)} rows and {total} tokens does not fit a program of "
                f"{shape.rows} rows and {shape.tokens} tokens; choose a larger bucket"
            )
        if shape.decode and any(len(row.tokens) != 1 for row in rows):
            raise ValueError("a decode program takes exactly one new token per row")
        for row in rows:
            ids = np.asarray(row.tokens)
            if not len(ids) or ids.min() < 0 or ids.max() >= self.vocab_size:
                raise ValueError(
                    f"sequence {row.sequence} needs token ids in [0, {self.vocab_size}), got "
                    f"{row.tokens if len(row.tokens) < 9 else 'some outside'}"
                )
            if len(row.stop_ids) > STOP_WIDTH:
                raise ValueError(f"at most {STOP_WIDTH} stop ids fit, got {len(row.stop_ids)}")

    def _fill_lengths(self, ints: dict[str, np.ndarray], rows: Sequence[Row]) -> None:
        bounds = np.cumsum([0, *(len(row.tokens) for row in rows)])
        ints["num_tokens"][...] = bounds[-1]
        ints["num_rows"][...] = len(rows)
        ints["cu_q_lens"][...] = bounds[-1]
        ints["cu_q_lens"][: len(bounds)] = bounds
        for index, row in enumerate(rows):
            span = slice(bounds[index], bounds[index + 1])
            ints["tokens"][span] = row.tokens
            ints["positions"][span] = np.arange(row.start, row.start + len(row.tokens))
            ints["seq_lens"][index] = row.start + len(row.tokens)

    def _fill_tables(
        self, ints: dict[str, np.ndarray], rows: Sequence[Row], group: str, accounts: Accounts
    ) -> None:
        table, slots = ints[f"{group}.page_table"], ints[f"{group}.write_slots"]
        first = 0
        for index, row in enumerate(rows):
            pages = accounts.page_table(row.sequence, group)
            if len(pages) > table.shape[1]:
                raise ValueError(
                    f"sequence {row.sequence} holds {len(pages)} pages of group {group}, but the "
                    f"program's table has {table.shape[1]}; choose a wider bucket"
                )
            table[index, : len(pages)] = pages
            last = first + len(row.tokens)
            stop = row.start + len(row.tokens)
            slots[first:last] = accounts.slots(row.sequence, group, row.start, stop)
            first = last

    def _fill_choice(
        self, ints: dict[str, np.ndarray], floats: dict[str, np.ndarray], index: int, row: Row
    ) -> None:
        params = row.params
        low, high = split_seed(row.seed)
        values = {
            "seed_low": low,
            "seed_high": high,
            "top_k": params.top_k,
            "block_stop": row.generated < params.min_tokens,
            "max_tokens": row.max_tokens,
            "min_tokens": params.min_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
        }
        for name, value in values.items():
            for packed in (ints, floats):
                if name in packed:
                    packed[name][index] = value
        if "stop_ids" in ints:
            ints["stop_ids"][index, : len(row.stop_ids)] = row.stop_ids

    def unpack(
        self,
        shape: StepShape,
        ints: Int[Array, " packed"],
        floats: Float[Array, " packed_floats"] | None = None,
    ) -> tuple[StepBatch, Limits | None]:
        """Names the fields again, inside the trace; a `loop` program also gets its limits.

        A greedy program has no floats, and may be given none.
        """
        fields = split(ints, self._int_fields(shape)) | split(floats, float_fields(shape))
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
        limits = None
        if shape.loop:
            limits = Limits(**{name: fields[name] for name in _LIMIT_FIELDS})
        return batch, limits

    def _int_fields(self, shape: StepShape) -> tuple[Field, ...]:
        return int_fields(self.layout, self.counts, self.vocab_size, shape)


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

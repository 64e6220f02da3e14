"""Turns what the host knows about a step into one int32 and one float32 array, and back into names in the trace.

Each field is written fresh for every step, so nothing of an earlier, longer batch can be read again. The packer
checks ids and widths; it decides nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.batch import PagedTables, SamplingBatch, StateTables, StepBatch
from jaxkv.cache.accounts import Accounts
from jaxkv.cache.spec import CacheLayout, Group
from jaxkv.engine.fields import Arrangement, StepShape, float_fields, int_fields
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
        self._arrangements: dict[StepShape, tuple[Arrangement, Arrangement]] = {}

    def pack(
        self, shape: StepShape, rows: Sequence[Row], accounts: Accounts
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the int32 and the float32 array of a step.

        Raises:
            ValueError: the rows exceed the shape, or a token id is not one of the model's.
        """
        tokens, lens = self._check(shape, rows)
        packed_ints, packed_floats = self.blank(shape)
        int_places, float_places = self.arrangements(shape)
        ints, floats = int_places.split(packed_ints), float_places.split(packed_floats)
        starts = np.asarray([row.start for row in rows], np.int32)
        bounds = np.concatenate([np.zeros(1, np.int32), np.cumsum(lens, dtype=np.int32)])
        owner = np.repeat(np.arange(len(rows), dtype=np.int32), lens)
        positions = np.arange(len(tokens), dtype=np.int32) + (starts - bounds[:-1])[owner]
        ints["num_tokens"][...] = len(tokens)
        ints["num_rows"][...] = len(rows)
        ints["tokens"][: len(tokens)] = tokens
        ints["positions"][: len(tokens)] = positions
        ints["cu_q_lens"][...] = len(tokens)
        ints["cu_q_lens"][: len(bounds)] = bounds
        ints["seq_lens"][: len(rows)] = starts + lens
        for group in self.layout.paged_groups:
            table, slots = ints[f"{group.name}.page_table"], ints[f"{group.name}.write_slots"]
            self._fill_table(table, rows, group, accounts, starts + lens)
            pages = table[owner, positions // group.page_size]
            slots[: len(tokens)] = pages * group.page_size + positions % group.page_size
        self._fill_states(ints, rows, accounts)
        self._fill_choices(ints | floats, rows)
        return packed_ints, packed_floats

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

    def _check(self, shape: StepShape, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        """Returns all new tokens and how many each row has, or refuses what the device could not."""
        lens = np.asarray([len(row.tokens) for row in rows], np.int32)
        if len(rows) > shape.rows or lens.sum() > shape.tokens:
            raise ValueError(
                f"a step of {len(rows)} rows and {lens.sum()} tokens does not fit a program of "
                f"{shape.rows} rows and {shape.tokens} tokens; choose a larger bucket"
            )
        if not rows or lens.min() < 1 or (shape.decode and lens.max() > 1):
            wanted = "exactly one" if shape.decode else "at least one"
            raise ValueError(f"a step needs rows of {wanted} new token ids, got {lens.tolist()}")
        tokens = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int64, lens.sum())
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(
                f"token ids must lie in [0, {self.vocab_size}), got {tokens.min()} to {tokens.max()}"
            )
        return tokens, lens

    def _fill_table(
        self,
        table: np.ndarray,
        rows: Sequence[Row],
        group: Group,
        accounts: Accounts,
        seq_lens: np.ndarray,
    ) -> None:
        for index, row in enumerate(rows):
            pages = accounts.page_table(row.sequence, group.name)
            if len(pages) > table.shape[1]:
                raise ValueError(
                    f"sequence {row.sequence} holds {len(pages)} pages of group {group.name}, but the "
                    f"program's table has {table.shape[1]}; choose a wider bucket"
                )
            if len(pages) * group.page_size < seq_lens[index]:
                raise ValueError(
                    f"sequence {row.sequence} has {len(pages)} pages of {group.page_size} tokens in "
                    f"{group.name}, which do not hold {seq_lens[index]} tokens; reserve first"
                )
            table[index, : len(pages)] = pages

    def _fill_states(
        self, ints: dict[str, np.ndarray], rows: Sequence[Row], accounts: Accounts
    ) -> None:
        for group in self.layout.state_groups:
            pairs = [accounts.states(row.sequence, group.name) for row in rows]
            ints[f"{group.name}.read_states"][: len(rows)] = [read for read, _ in pairs]
            ints[f"{group.name}.write_states"][: len(rows)] = [write for _, write in pairs]
        for index, row in enumerate(rows):
            if row.emits:
                ints["slots"][index] = accounts.states(row.sequence, "sampling")[1]

    def _fill_choices(self, fields: dict[str, np.ndarray], rows: Sequence[Row]) -> None:
        for name in _CHOICES.keys() & fields.keys():
            fields[name][: len(rows)] = [_CHOICES[name](row) for row in rows]
        if "stop_ids" in fields:
            for index, row in enumerate(rows):
                if len(row.stop_ids) > STOP_WIDTH:
                    raise ValueError(f"at most {STOP_WIDTH} stop ids fit, got {len(row.stop_ids)}")
                fields["stop_ids"][index, : len(row.stop_ids)] = row.stop_ids

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
        limits = None
        if shape.loop:
            limits = Limits(**{name: fields[name] for name in _LIMIT_FIELDS})
        return batch, limits


_CHOICES: Mapping[str, Callable[[Row], float]] = {
    "carry": lambda row: row.carry,
    "seed_low": lambda row: split_seed(row.seed)[0],
    "seed_high": lambda row: split_seed(row.seed)[1],
    "top_k": lambda row: row.params.top_k,
    "block_stop": lambda row: row.generated < row.params.min_tokens,
    "max_tokens": lambda row: row.max_tokens,
    "min_tokens": lambda row: row.params.min_tokens,
    "temperature": lambda row: row.params.temperature,
    "top_p": lambda row: row.params.top_p,
    "min_p": lambda row: row.params.min_p,
    "repetition": lambda row: row.params.repetition_penalty,
    "presence": lambda row: row.params.presence_penalty,
    "frequency": lambda row: row.params.frequency_penalty,
}
"""Field -> what a row says for it."""

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

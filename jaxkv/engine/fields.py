"""The pieces of a packed step, each with its shape and its padding, for one padded shape. Fills nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from jaxkv.batch import Features
from jaxkv.cache.spec import CacheLayout
from jaxkv.engine.rows import STOP_WIDTH


@dataclass(frozen=True)
class StepShape:
    """The padded sizes of one step program, and what it can do. Hashable: a part of its key.

    Attributes:
        tokens, rows: most new tokens and most sequences.
        table_widths: pages per row, for each paged group.
        features: how it can choose tokens.
        decode: one query per row.
        loop: it generates until rows stop, so it also takes each row's limits and stop ids.
        snapshots: most states of each recurrent group that it can keep on its way.
        fresh: all rows begin at their first token; programs differ by it where the cache's layout `expands`.
        steps: decode steps that it runs one after the other.
    """

    tokens: int
    rows: int
    table_widths: tuple[int, ...]
    features: Features = Features()
    decode: bool = False
    loop: bool = False
    snapshots: int = 0
    fresh: bool = False
    steps: int = 1


@dataclass(frozen=True)
class Field:
    """One named piece of a packed array.

    Attributes:
        shape: its padded shape.
        pad: the value of unused entries; with `counted` the r-th entry along the first axis is padded
            with `pad + r`, which makes out-of-range slots distinct.
    """

    name: str
    shape: tuple[int, ...]
    pad: int | float = 0
    counted: bool = False

    @property
    def size(self) -> int:
        """Entries of the flattened field."""
        return int(np.prod(self.shape, dtype=np.int64))

    def blank(self, dtype: type) -> np.ndarray:
        """Returns the field with nothing but padding."""
        values = np.full(self.shape, self.pad, dtype)
        if self.counted:
            values += np.arange(self.shape[0], dtype=dtype).reshape(-1, *(1,) * (values.ndim - 1))
        return values


def int_fields(
    layout: CacheLayout, counts: Mapping[str, int], vocab_size: int, shape: StepShape
) -> tuple[Field, ...]:
    """Returns the fields of the int32 array, in order."""
    tokens, rows = (shape.tokens,), (shape.rows,)
    fields = [
        Field("num_tokens", ()),
        Field("num_rows", ()),
        Field("tokens", tokens),
        Field("positions", tokens),
        Field("cu_q_lens", (shape.rows + 1,)),
        Field("seq_lens", rows),
        Field("slots", rows, counts["sampling"], counted=True),
        Field("carry", rows),
    ]
    if shape.steps > 1:
        fields.append(Field("left", rows))
    for group, width in zip(layout.paged_groups, shape.table_widths, strict=True):
        num_slots = counts[group.name] * group.page_size
        fields.append(Field(f"{group.name}.page_table", (shape.rows, width)))
        fields.append(Field(f"{group.name}.write_slots", tokens, num_slots, counted=True))
    if shape.snapshots:
        # Rising and past the end of every row, so that padding keeps nothing.
        fields.append(Field("snapshot_ends", (shape.snapshots,), shape.tokens + 1, counted=True))
    for group in layout.state_groups:
        fields.append(Field(f"{group.name}.read_states", rows))
        num_states = counts[group.name]
        fields.append(Field(f"{group.name}.write_states", rows, num_states, counted=True))
        if shape.snapshots:
            kept = (shape.snapshots,)
            fields.append(Field(f"{group.name}.snapshot_states", kept, num_states, counted=True))
    return (*fields, *_choice_fields(vocab_size, shape))


def _choice_fields(vocab_size: int, shape: StepShape) -> list[Field]:
    rows, stop = (shape.rows,), (shape.rows, STOP_WIDTH)
    fields = []
    if shape.features.draws:
        fields += [Field("seed_low", rows), Field("seed_high", rows)]
    if shape.features.filters:
        fields += [Field("top_k", rows)]
    if shape.features.min_tokens or shape.loop:
        fields += [Field("stop_ids", stop, vocab_size)]
    if shape.features.min_tokens and not shape.loop:
        fields += [Field("block_stop", rows)]
    if shape.loop:
        fields += [Field("max_tokens", rows), Field("min_tokens", rows)]
    return fields


def float_fields(shape: StepShape) -> tuple[Field, ...]:
    """Returns the fields of the float32 array, in order; empty for a greedy program."""
    rows = (shape.rows,)
    fields = []
    if shape.features.draws:
        fields += [Field("temperature", rows)]
    if shape.features.filters:
        fields += [Field("top_p", rows, 1.0), Field("min_p", rows)]
    if shape.features.penalties:
        fields += [
            Field("repetition", rows, 1.0),
            Field("presence", rows),
            Field("frequency", rows),
        ]
    return tuple(fields)


ALIGNMENT = 64
"""Entries at whose multiples fields begin: 256 bytes, the alignment that kernels ask of their arguments.

XLA may hand a kernel a piece of the packed array where it lies.
"""


class Arrangement:
    """Where each field lies in one packed array. Made once per shape.

    Attributes:
        blank: the array with nothing but padding, read-only; every step starts from a copy.
    """

    def __init__(self, fields: tuple[Field, ...], dtype: type) -> None:
        rooms = [-(-field.size // ALIGNMENT) * ALIGNMENT for field in fields]
        starts = [0, *accumulate(rooms)]
        self._places = [
            (field.name, start, start + field.size, field.shape)
            for field, start in zip(fields, starts, strict=False)
        ]
        self.blank = np.zeros(starts[-1], dtype)
        for field, values in zip(fields, self.split(self.blank).values(), strict=True):
            values[...] = field.blank(dtype)
        self.blank.flags.writeable = False

    def split(self, packed: Any) -> dict[str, Any]:  # noqa: ANN401 - NumPy or JAX
        """Names the pieces of a packed array; for NumPy they are views, through which it is filled."""
        return {
            name: packed[start:stop].reshape(shape) for name, start, stop, shape in self._places
        }

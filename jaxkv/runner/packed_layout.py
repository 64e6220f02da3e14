"""The packed arrays of a step: where each field lies, with its shape and padding, and its name inside the trace."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import CacheLayout
from jaxkv.runner.program_specs import StepSpec
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.fields import fields_for


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
    layout: CacheLayout, counts: Mapping[str, int], shape: StepSpec
) -> tuple[Field, ...]:
    """Returns the fields of the int32 array, in order."""
    tokens, rows = (shape.tokens,), (shape.rows,)
    fields = [
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
    if shape.features.min_tokens:
        fields.append(Field("block_stop", rows))
    return (*fields, *_choice_fields(shape, np.int32))


def _choice_fields(shape: StepSpec, dtype: type) -> list[Field]:
    """Returns the columns of `jaxkv.sampling.fields` that lie in the array of a dtype."""
    return [
        Field(field.name, field.shape(shape.rows), field.off)
        for field in fields_for(shape.features)
        if field.dtype is dtype
    ]


def float_fields(shape: StepSpec) -> tuple[Field, ...]:
    """Returns the fields of the float32 array, in order; empty for a greedy program."""
    return tuple(_choice_fields(shape, np.float32))


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


class PackedLayout:
    """Lays out the packed arrays of all steps over one cache.

    Args:
        layout: the cache's groups.
        counts: pages or states of each group.
    """

    def __init__(self, layout: CacheLayout, counts: Mapping[str, int]) -> None:
        self.layout = layout
        self.counts = dict(counts)
        self._arrangements: dict[StepSpec, tuple[Arrangement, Arrangement]] = {}

    def arrangements(self, shape: StepSpec) -> tuple[Arrangement, Arrangement]:
        """Returns where the int32 and the float32 fields of a shape lie."""
        known = self._arrangements.get(shape)
        if known is None:
            ints = int_fields(self.layout, self.counts, shape)
            known = (Arrangement(ints, np.int32), Arrangement(float_fields(shape), np.float32))
            self._arrangements[shape] = known
        return known

    def blank(self, shape: StepSpec) -> tuple[np.ndarray, np.ndarray]:
        """Returns the arrays of a step without rows: what a program is compiled for."""
        ints, floats = self.arrangements(shape)
        return ints.blank.copy(), floats.blank.copy()

    def left(self, shape: StepSpec, ints: Int[Array, " packed"]) -> Int[Array, " rows"]:
        """Names the field that says in how many of its steps each row takes part, inside the trace of several."""
        return self.arrangements(shape)[0].split(ints)["left"]

    def unpack(
        self,
        shape: StepSpec,
        ints: Int[Array, " packed"],
        floats: Float[Array, " packed_floats"] | None = None,
    ) -> StepBatch:
        """Names the fields again, inside the trace.

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
                snapshot_ends=fields.get("snapshot_ends"),
                snapshot_states=fields.get(f"{group.name}.snapshot_states"),
            )
            for group in self.layout.state_groups
        )
        chosen = [field.name for field in fields_for(shape.features)]
        if shape.features.min_tokens:
            chosen.append("block_stop")
        return StepBatch(
            **{name: fields[name] for name in _BATCH_FIELDS},
            paged=paged,
            states=states,
            sampling=SamplingBatch(
                slots=fields["slots"],
                carry=fields["carry"],
                values={name: fields[name] for name in chosen},
                features=shape.features,
            ),
            decode=shape.decode,
            fresh=shape.fresh,
        )


_BATCH_FIELDS = ("tokens", "positions", "cu_q_lens", "seq_lens")

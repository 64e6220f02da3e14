"""The layout of the packed arrays of a step: name, offset, shape and padding of each field."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.batch import PagedTables, StateTables, StepBatch
from jaxkv.cache.spec import CacheLayout
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.runner.shared_rows import FEWEST_SHARING
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.features import Features
from jaxkv.sampling.fields import NO_TOKEN, fields_for
from jaxkv.sampling.processors import NO_PROCESSORS, LogitsProcessors
from jaxkv.sampling.token_mask import num_words
from pallas_kernels.shared_keys import ROWS_PER_TILE, SharedKeys


@dataclass(frozen=True)
class Field:
    """One named field of a packed array.

    Attributes:
        name: its name.
        shape: its padded shape.
        pad: the value of unused entries.
        counted: the r-th entry along the first axis is padded with `pad + r`, so that out-of-range slots are distinct.
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
        """Returns the field filled with padding."""
        values = np.full(self.shape, self.pad, dtype)
        if self.counted:
            values += np.arange(self.shape[0], dtype=dtype).reshape(-1, *(1,) * (values.ndim - 1))
        return values


def int_fields(
    layout: CacheLayout, counts: Mapping[str, int], shape: StepSpec, vocab_size: int
) -> tuple[Field, ...]:
    """Returns the fields of the int32 array, in order."""
    tokens, rows = (shape.tokens,), (shape.rows,)
    fields = [
        Field("tokens", tokens),
        Field("positions", tokens),
        Field("cu_q_lens", (shape.rows + 1,)),
        Field("seq_lens", rows),
        Field("sampling_states", rows, counts["sampling"], counted=True),
        Field("carry", rows),
    ]
    if shape.steps > 1:
        fields.append(Field("left", rows))
    if shape.drafts:
        fields.append(Field("drafts", rows))
    for group, width in zip(layout.paged_groups, shape.table_widths, strict=True):
        num_slots = counts[group.name] * group.page_size
        fields.append(Field(f"{group.name}.page_table", (shape.rows, width)))
        fields.append(Field(f"{group.name}.write_slots", tokens, num_slots, counted=True))
    if shape.shares:
        tiles = shape.rows // FEWEST_SHARING
        fields.append(Field("shared_rows", (tiles * ROWS_PER_TILE,), shape.rows))
        fields.append(Field("shared_places", rows, tiles * ROWS_PER_TILE))
        fields.append(Field("shared_lens", (tiles,)))
    if shape.pending_checkpoints:
        # Padding ascends past the end of every row, so that it writes no state.
        fields.append(
            Field("snapshot_ends", (shape.pending_checkpoints,), shape.tokens + 1, counted=True)
        )
    for group in layout.state_groups:
        fields.append(Field(f"{group.name}.read_states", rows))
        num_states = counts[group.name]
        fields.append(Field(f"{group.name}.write_states", rows, num_states, counted=True))
        if shape.pending_checkpoints:
            kept = (shape.pending_checkpoints,)
            fields.append(Field(f"{group.name}.snapshot_states", kept, num_states, counted=True))
    if shape.features.min_tokens:
        each_position = (shape.rows, shape.drafts + 1) if shape.drafts else rows
        fields.append(Field("block_stop", each_position))
    if shape.features.grammar:
        fields += mask_fields(shape, vocab_size)
    if shape.features.logprobs is not None:
        fields.append(Field("given", (shape.rows, shape.steps), NO_TOKEN))
    return (*fields, *_sampling_fields(shape, np.int32))


def sampling_int_fields(counts: Mapping[str, int], spec: SampleSpec) -> tuple[Field, ...]:
    """Returns the fields of the int32 array of a program that samples, in order."""
    rows = (spec.rows,)
    fields = [
        Field("seq_lens", rows),
        Field("sampling_states", rows, counts["sampling"], counted=True),
    ]
    if spec.features.min_tokens:
        fields.append(Field("block_stop", rows))
    if spec.features.logprobs is not None:
        fields.append(Field("given", (spec.rows, 1), NO_TOKEN))
    return (*fields, *_sampling_fields(spec, np.int32))


def mask_fields(spec: StepSpec | SampleSpec, vocab_size: int) -> tuple[Field, ...]:
    """Returns the fields of the masks: each different mask once, and for each row the index of its mask."""
    return (
        Field("mask_of_row", (spec.rows,), spec.masks),
        Field("token_masks", (spec.masks, num_words(vocab_size))),
    )


def _sampling_fields(shape: StepSpec | SampleSpec, dtype: type) -> list[Field]:
    """Returns the sampling parameters of `jaxkv.sampling.fields` that have this dtype."""
    return [
        Field(field.name, field.shape(shape.rows), field.off)
        for field in fields_for(shape.features)
        if field.dtype is dtype
    ]


def float_fields(shape: StepSpec | SampleSpec) -> tuple[Field, ...]:
    """Returns the fields of the float32 array, in order; empty for a greedy program."""
    return tuple(_sampling_fields(shape, np.float32))


ALIGNMENT = 64
"""Fields begin at multiples of this many entries: 256 bytes, the alignment that kernels need.

XLA may pass a kernel a slice of the packed array without copying it.
"""


class Arrangement:
    """The offsets of the fields of one packed array.

    Args:
        fields: the fields, in order.
        dtype: dtype of the array.

    Attributes:
        blank: the array filled with padding, read-only; each step starts from a copy.
    """

    def __init__(self, fields: tuple[Field, ...], dtype: type) -> None:
        sizes = [-(-field.size // ALIGNMENT) * ALIGNMENT for field in fields]
        starts = [0, *accumulate(sizes)]
        self._places = [
            (field.name, start, start + field.size, field.shape)
            for field, start in zip(fields, starts, strict=False)
        ]
        self.blank = np.zeros(starts[-1], dtype)
        for field, values in zip(fields, self.split(self.blank).values(), strict=True):
            values[...] = field.blank(dtype)
        self.blank.flags.writeable = False

    def split(self, packed: Any) -> dict[str, Any]:  # noqa: ANN401 - NumPy or JAX
        """Returns field name -> field of a packed array; for NumPy the fields are views, through which it is filled."""
        return {
            name: packed[start:stop].reshape(shape) for name, start, stop, shape in self._places
        }


class PackedLayout:
    """The layouts of the packed arrays of all steps over one cache, computed once per shape.

    Args:
        layout: the cache's groups.
        counts: group name -> pages or states of that group.
        vocab_size: number of the model's logits, for the masks of grammars.
        processors: the registered logits processors, which the batches have.
    """

    def __init__(
        self,
        layout: CacheLayout,
        counts: Mapping[str, int],
        vocab_size: int,
        processors: LogitsProcessors = NO_PROCESSORS,
    ) -> None:
        self.layout = layout
        self.counts = dict(counts)
        self._vocab_size = vocab_size
        self._processors = processors
        self._arrangements: dict[StepSpec | SampleSpec, tuple[Arrangement, Arrangement]] = {}
        self._mask_arrangements: dict[SampleSpec, Arrangement] = {}

    def arrangements(self, shape: StepSpec | SampleSpec) -> tuple[Arrangement, Arrangement]:
        """Returns the arrangements of the int32 and of the float32 array of a shape."""
        arrangements = self._arrangements.get(shape)
        if arrangements is None:
            ints = (
                sampling_int_fields(self.counts, shape)
                if isinstance(shape, SampleSpec)
                else int_fields(self.layout, self.counts, shape, self._vocab_size)
            )
            arrangements = (
                Arrangement(ints, np.int32),
                Arrangement(float_fields(shape), np.float32),
            )
            self._arrangements[shape] = arrangements
        return arrangements

    def mask_arrangement(self, spec: SampleSpec) -> Arrangement:
        """Returns the arrangement of the masks of a program that samples, an int32 array of their own."""
        arrangement = self._mask_arrangements.get(spec)
        if arrangement is None:
            arrangement = Arrangement(mask_fields(spec, self._vocab_size), np.int32)
            self._mask_arrangements[spec] = arrangement
        return arrangement

    def blank(self, shape: StepSpec) -> tuple[np.ndarray, np.ndarray]:
        """Returns the arrays of a step without rows; a program is compiled for their shapes."""
        ints, floats = self.arrangements(shape)
        return ints.blank.copy(), floats.blank.copy()

    def left(self, shape: StepSpec, ints: Int[Array, " packed"]) -> Int[Array, " rows"]:
        """Returns how many of the program's steps each row takes part in, inside the trace of several steps."""
        return self.arrangements(shape)[0].split(ints)["left"]

    def drafts(self, shape: StepSpec, ints: Int[Array, " packed"]) -> Int[Array, " rows"]:
        """Returns how many of each row's last tokens are drafts, inside the trace of a step that verifies them."""
        return self.arrangements(shape)[0].split(ints)["drafts"]

    def blank_sampling(self, spec: SampleSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the arrays of a program that samples, without rows: int32, masks, float32."""
        ints, floats = self.arrangements(spec)
        return ints.blank.copy(), self.mask_arrangement(spec).blank.copy(), floats.blank.copy()

    def unpack_sampling(
        self,
        spec: SampleSpec,
        ints: Int[Array, " packed"],
        masks: Int[Array, " packed_masks"],
        floats: Float[Array, " packed_floats"] | None = None,
    ) -> tuple[SamplingBatch, Int[Array, " rows"]]:
        """Returns the sampling inputs that packed arrays hold, and the position of each token, inside the trace.

        Args:
            spec: the spec of the program.
            ints: the int32 array.
            masks: the masks, int32.
            floats: the float32 array; `None` for a greedy program, which has no float fields.
        """
        int_places, float_places = self.arrangements(spec)
        fields = int_places.split(ints) | float_places.split(floats)
        fields |= self.mask_arrangement(spec).split(masks)
        # Only the forward pass reads `carry`.
        carry = jnp.zeros(spec.rows, jnp.int32)
        return self._sampling_batch(spec.features, fields, carry), fields["seq_lens"]

    def unpack(
        self,
        shape: StepSpec,
        ints: Int[Array, " packed"],
        floats: Float[Array, " packed_floats"] | None = None,
    ) -> StepBatch:
        """Returns the batch that packed arrays hold, inside the trace.

        Args:
            shape: the spec of the program.
            ints: the int32 array.
            floats: the float32 array; `None` for a greedy program, which has no float fields.
        """
        int_places, float_places = self.arrangements(shape)
        fields = int_places.split(ints) | float_places.split(floats)
        names = [f"shared_{name}" for name in SharedKeys._fields]
        shared = SharedKeys(*(fields[name] for name in names)) if shape.shares else None
        paged = tuple(
            PagedTables(
                # Without the barrier, XLA passes kernels a slice of the packed array by a fusion that command buffers
                # do not support. The step would then be split into several CUDA graphs.
                page_table=lax.optimization_barrier(fields[f"{group.name}.page_table"]),
                write_slots=fields[f"{group.name}.write_slots"],
                shared=shared if group is self.layout.shared_group else None,
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
        return StepBatch(
            **{name: fields[name] for name in _BATCH_FIELDS},
            paged=paged,
            states=states,
            sampling=self._sampling_batch(shape.features, fields, fields["carry"]),
            decode=shape.decode,
            fresh=shape.fresh,
        )

    def _sampling_batch(
        self, features: Features, fields: Mapping[str, Array], carry: Int[Array, " rows"]
    ) -> SamplingBatch:
        names = [field.name for field in fields_for(features)]
        if features.min_tokens:
            names.append("block_stop")
        if features.logprobs is not None:
            names.append("given")
        values = {name: fields[name] for name in names}
        if features.grammar:
            masks = fields["token_masks"].at[fields["mask_of_row"]]
            # A row without a mask has an index past the end, and every token is allowed.
            values["token_mask"] = masks.get(mode="fill", fill_value=-1)
        return SamplingBatch(
            state_ids=fields["sampling_states"],
            carry=carry,
            values=values,
            features=features,
            processors=self._processors,
        )


_BATCH_FIELDS = ("tokens", "positions", "cu_q_lens", "seq_lens")

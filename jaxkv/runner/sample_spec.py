"""`SampleSpec`: the second of two programs of a step, which samples from the hidden states of the first.

A step that has rows with a grammar runs as two programs. The first one (`StepSpec.forward_only`) needs no masks, so it
is dispatched before the host has read the tokens before; the masks, which need these, are computed while it runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array

from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import Cache
from jaxkv.models.protocol import Params
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec, Size
from jaxkv.runner.buckets import FEW_MASKS
from jaxkv.runner.program_specs import Runner, StepFields, StepSpec, without_empty
from jaxkv.runner.sampled_rows import pack_sampled
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.features import Features
from jaxkv.step.step import sample_tokens


@runtime_checkable
class SampleFields(StepFields, Protocol):
    """Unpacks the arrays of programs that sample too; `jaxkv.runner.packed_layout.PackedLayout` is one."""

    def blank_sampling(self, spec: "SampleSpec", /) -> tuple[np.ndarray, ...]:
        """Returns the packed arrays of a program without rows."""
        ...

    def unpack_sampling(
        self, spec: "SampleSpec", ints: Array, masks: Array, floats: Array | None = None, /
    ) -> tuple[SamplingBatch, Array]:
        """Returns the sampling inputs that packed arrays hold, and each token's position, inside a trace."""
        ...


@runtime_checkable
class SampleRunner(Runner, Protocol):
    """What a program that samples is lowered for."""

    @property
    def hidden_type(self) -> jax.ShapeDtypeStruct:
        """Type of one row's hidden state, [1, hidden_size]."""
        ...

    @property
    def packed_layout(self) -> SampleFields:
        """Layout of the packed arrays."""
        ...


@dataclass(frozen=True)
class SampleSpec(ProgramSpec["SampleRunner"]):
    """A program that samples one token per row from hidden states.

    Attributes:
        rows: rows of the `forward_only` program whose hidden states it takes.
        features: sampling features that it supports.
        masks: most different masks of rows with a grammar.
    """

    rows: int
    features: Features
    masks: int

    @property
    def kind(self) -> str:
        """Always "sample"."""
        return "sample"

    @property
    def name(self) -> str:
        """Kind, rows and masks."""
        return f"sample_{self.rows}_{self.masks}_masks"

    def sizes(self) -> dict[str, Size]:
        """Returns sizes and features by name."""
        sizes: dict[str, Size] = {"rows": self.rows}
        sizes |= {part.name: getattr(self.features, part.name) for part in fields(self.features)}
        return sizes | {"masks": self.masks}

    def serves(self, needed: ProgramSpec) -> bool:
        """Returns whether it has equal rows, at least as many masks, and features that cover those of `needed`."""
        return (
            isinstance(needed, SampleSpec)
            and self.rows == needed.rows
            and self.masks >= needed.masks
            and self.features.covers(needed.features)
        )

    def costs_like(self, needed: ProgramSpec) -> bool:
        """Returns whether it has the features of `needed`, and few masks or no more than that."""
        return (
            isinstance(needed, SampleSpec)
            and self.masks <= max(needed.masks, FEW_MASKS)
            and self.features == needed.features
        )

    @property
    def order_of_cost(self) -> tuple[int, ...]:
        """Fewer masks first."""
        return (self.masks,)

    def lowering(self, runner: SampleRunner) -> Lowering:
        """Returns `choices, packed tokens = run(params, choices, hidden, *packed)`, which donates `choices`.

        These are the arrays of the cache's sampling group by role; the other arrays of the cache are not touched.
        """
        model, packed_layout = runner.model, runner.packed_layout

        def run(
            params: Params, choices: dict[str, Array], hidden: Array, *packed: Array
        ) -> tuple[dict[str, Array], Array]:
            sampling, positions = packed_layout.unpack_sampling(self, *packed)
            choices, sampled = sample_tokens(model, params, choices, hidden, sampling, positions)
            return choices, pack_sampled(sampled)

        one = runner.hidden_type
        hidden = jax.ShapeDtypeStruct((self.rows, *one.shape[1:]), one.dtype)
        choices = sampling_arrays(runner.layout, runner.cache)
        arrays = without_empty(packed_layout.blank_sampling(self))
        return Lowering(run, (runner.params, choices, hidden, *arrays), cache_argument=1)


def sampling_arrays(layout: CacheLayout, cache: Cache) -> dict[str, Array]:
    """Returns role -> array of the cache's sampling group."""
    group = layout.group("sampling")
    [layer] = group.layers
    arrays: Mapping[str, Array] = cache.layer(layer)
    return {array.role: arrays[array.role] for array in group.spec.arrays}


def find_hidden_type(runner: Runner) -> jax.ShapeDtypeStruct:
    """Returns the type of one row's hidden state, [1, hidden_size]. It traces a step of one token."""
    widths = (1,) * len(runner.layout.paged_groups)
    lowering = StepSpec(1, 1, widths, decode=True, forward_only=True).lowering(runner)
    _, hidden = jax.eval_shape(lowering.function, *lowering.arguments)
    return hidden

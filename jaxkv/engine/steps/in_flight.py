"""A step in flight, sampled or not: its rows, its output on the device, and the unpacking of its results."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array

from jaxkv.engine.request_state import RequestState
from jaxkv.engine.steps.step_plan import Part, columns_of, first_step, token_masks_of
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import PendingCheckpoint, StepRows
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.runner.sampled_rows import SampledRows, unpack_sampled
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.sampling.features import Features


@dataclass(frozen=True)
class InFlightStep:
    """A program of one or several steps that was dispatched and is not read yet.

    Attributes:
        parts: its rows, in order.
        epochs: the epoch of each row's request at dispatch.
        shape: the spec of its program, or of the first of two.
        out: packed sampled tokens on the device.
        weight_version: version of the parameters that it runs with.
        pending_checkpoints: the pending state checkpoints that it writes.
        sampler: the spec of its second program; `None` for a step in one.
    """

    parts: tuple[Part, ...]
    epochs: tuple[int, ...]
    shape: StepSpec
    out: Array
    weight_version: WeightVersion = 0
    pending_checkpoints: tuple[PendingCheckpoint, ...] = ()
    sampler: SampleSpec | None = None

    @property
    def features(self) -> Features:
        """Sampling features of the program that sampled, which determine the columns of `out`."""
        return self.shape.features if self.sampler is None else self.sampler.features

    def start_copy_to_host(self) -> None:
        """Starts the copy of `out` to the host, which `is_done` needs."""
        # A failed step raises in `ModelRunner.read`, not here.
        with suppress(jax.errors.JaxRuntimeError):
            self.out.copy_to_host_async()

    @property
    def is_done(self) -> bool:
        """Whether the device has computed `out`; call `start_copy_to_host` first."""
        return self.out.is_ready()  # pyright: ignore[reportAttributeAccessIssue] - JAX does not declare it

    def unpack(self, packed: np.ndarray) -> list[SampledRows]:
        """Returns the sampled tokens of each of its steps, or positions of drafts; `packed` is `out` on the host."""
        several = packed if self.shape.steps > 1 or self.shape.drafts else packed[None]
        return [unpack_sampled(one, self.features) for one in several]


@dataclass(frozen=True)
class UnsampledStep:
    """A step whose first program was dispatched, and whose second one waits for the masks of its rows.

    Attributes:
        step: the step; its `out` are the rows' hidden states, [rows, hidden_size], which the runner has too.
        arrays: packed sampling inputs, as `SequenceRunner.sample` takes them.
        bound: indices of the parts whose tokens a grammar bounds.
    """

    step: InFlightStep
    arrays: tuple[np.ndarray, np.ndarray]
    bound: Sequence[int]

    def settled(self) -> tuple[tuple[Part, ...], list[np.ndarray | None]]:
        """Returns the parts as they count now, and the mask of each, see `StepRows.masks`.

        A part whose next token is known by now, because its grammar has forced it, emits none and has no mask.
        """
        parts = list(self.step.parts)
        masks: list[np.ndarray | None] = [None] * len(parts)
        for index in self.bound:
            part = parts[index]
            sequence = part.sequence
            if len(sequence.tokens) > part.start + part.count:
                parts[index] = part._replace(emits=0)
            elif sequence.constraint is not None:
                masks[index] = sequence.constraint.mask
        return tuple(parts), masks


def step_rows_of(
    parts: Sequence[Part],
    shape: StepSpec,
    pending_checkpoints: Sequence[PendingCheckpoint] = (),
    features: Features | None = None,
) -> StepRows:
    """Returns the rows of a step as the packer takes them.

    The ids of a carried token, and of drafts behind one, are 0: the device reads them from the sampling group.

    Args:
        parts: the parts of the step.
        shape: the spec of its program, or of the first of two.
        pending_checkpoints: the pending state checkpoints that the step writes.
        features: sampling features of the second program; those of `shape` if not given.
    """
    features = shape.features if features is None else features
    left: Sequence[int] = ()
    if shape.steps > 1:
        left = [part.count for part in parts]
        parts = [first_step(part) for part in parts]
    columns = columns_of(parts)
    sequences, starts, counts, emits, carry, drafts = columns
    generated: list[int] = []
    if features.min_tokens:
        generated = [sequence.generated + sequence.pending for sequence in sequences]
    masks: list[np.ndarray | None] = []
    if shape.features.grammar:
        masks = token_masks_of(columns)
    given: list[tuple[int, ...]] = []
    if features.logprobs is not None and any(one.request.given for one in sequences):
        given = [_given(*pair) for pair in zip(sequences, left or emits, strict=True)]
    return StepRows(
        sequences=[sequence.number for sequence in sequences],
        tokens=[0] * sum(counts) if all(carry) else _new_tokens(parts),
        lens=counts,
        starts=starts,
        emits=[one > 0 for one in emits],
        carry=carry,
        generated=generated,
        sampling=[sequence.request for sequence in sequences],
        pending_checkpoints=pending_checkpoints,
        left=left,
        masks=masks,
        given=given,
        drafts=[len(one) for one in drafts] if shape.drafts else (),
    )


def _new_tokens(parts: Sequence[Part]) -> list[int]:
    """Returns the new token ids of all parts, one after the other."""
    tokens: list[int] = []
    for sequence, start, count, _, carry, drafts in parts:
        if carry:
            tokens += [0] * count
        elif drafts:
            tokens.append(sequence.tokens[start])
            tokens += drafts
        elif count == 1:
            tokens.append(sequence.tokens[start])
        else:
            tokens += sequence.tokens[start : start + count]
    return tokens


def _given(sequence: RequestState, steps: int) -> tuple[int, ...]:
    """Returns the tokens that a request takes in the next `steps` steps; empty if it samples them."""
    known = sequence.generated + sequence.pending
    return sequence.request.given[known : known + steps]

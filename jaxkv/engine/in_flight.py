"""A step on its way: what its rows ask of the device, and how its results are found again. Decides nothing."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array

from jaxkv.engine.request_state import RequestState
from jaxkv.engine.step_plan import Part, single
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import Snapshot, StepRows
from jaxkv.runner.sampled_rows import SampledRows, report_logprobs, unpack_sampled


@dataclass(frozen=True)
class InFlightStep:
    """A step, or several in one program, that was dispatched and not read.

    Attributes:
        parts: its rows, in order.
        epochs: of their sequences, when it was dispatched.
        shape: of its program, which says what its choices hold.
        out: its packed choices.
        snapshots: states that it keeps on its way.
    """

    parts: tuple[Part, ...]
    epochs: tuple[int, ...]
    shape: StepSpec
    out: Array
    snapshots: tuple[Snapshot, ...] = ()

    def start_copy_to_host(self) -> None:
        """Copies its choices to the host as soon as they are computed. Needed before `is_done`."""
        # A step that failed raises when it is read, not here.
        with suppress(jax.errors.JaxRuntimeError):
            self.out.copy_to_host_async()

    @property
    def is_done(self) -> bool:
        """Whether the device has computed its choices; call `start_copy_to_host` before."""
        return self.out.is_ready()  # pyright: ignore[reportAttributeAccessIssue] - JAX does not declare it

    def choices(self, packed: np.ndarray) -> list[SampledRows]:
        """Names what each of its steps chose, out of `out` as it was read."""
        several = packed if self.shape.steps > 1 else packed[None]
        return [unpack_sampled(one, self.shape.features) for one in several]


def columns_of_parts(
    parts: Sequence[Part], shape: StepSpec, snapshots: Sequence[Snapshot] = ()
) -> StepRows:
    """Describes parts to the packer; a token that the host has not read yet is read on the device.

    Args:
        parts: the rows of a step.
        shape: of its program.
        snapshots: what it keeps on its way.
    """
    left: list[int] = []
    if shape.steps > 1:
        left = [part.count for part in parts]
        parts = [single(part) for part in parts]
    tokens: list[int] = []
    for sequence, start, count, _, carry in parts:
        if carry:
            tokens.append(0)
        elif count == 1:
            tokens.append(sequence.tokens[start])
        else:
            tokens += sequence.tokens[start : start + count]
    generated: list[int] = []
    if shape.features.min_tokens:
        generated = [part.sequence.generated + part.sequence.pending for part in parts]
    return StepRows(
        sequences=[part.sequence.number for part in parts],
        tokens=tokens,
        lens=[part.count for part in parts],
        starts=[part.start for part in parts],
        emits=[part.emits > 0 for part in parts],
        carry=[part.carry for part in parts],
        generated=generated,
        choices=[part.sequence.request for part in parts],
        snapshots=snapshots,
        left=left,
    )


def report(
    sequence: RequestState, token: int, index: int, rows: SampledRows
) -> dict[int, float] | None:
    """Returns the log-probabilities that a sequence asked for, out of its row of a step's choices."""
    top = sequence.request.params.logprobs
    if top is None:
        return None
    return report_logprobs(
        token,
        float(rows.logprob[index]),
        np.asarray(rows.top_ids[index, :top]),
        np.asarray(rows.top_logprobs[index, :top]),
    )

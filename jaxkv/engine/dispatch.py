"""Sends what was planned to the device: as several steps at once, as one, or as a smaller one. Reads no results."""

import logging
from collections import deque
from collections.abc import Sequence

from jaxkv.engine.finish import Endings
from jaxkv.engine.in_flight import Flight, columns_of_parts
from jaxkv.engine.multi_step import Bursts
from jaxkv.engine.oom_backoff import Retreat
from jaxkv.engine.prepare import prepare
from jaxkv.engine.recovery import is_fatal
from jaxkv.engine.request_state import RUNNING
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.state_checkpoints import Checkpointing
from jaxkv.engine.step_plan import Part, StepPlan, single
from jaxkv.errors import STEP_FAILURES, CachePoisoned
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.runner.step_shapes import StepShapes
from jaxkv.sampling.features import union

_LOG = logging.getLogger(__name__)


class Launcher:
    """Sends the steps of one engine, and has them until they are read.

    Args:
        sequence_runner: runs them.
        scheduler: hears what was sent, and what has to wait.
        endings: of whoever fits into no step.
        shapes: padded shapes of single steps.
        steps: of each burst, as `Bursts` takes them.
        checkpointing: says which states a step keeps; `None` if none.
    """

    def __init__(
        self,
        sequence_runner: SequenceRunner,
        scheduler: Scheduler,
        endings: Endings,
        shapes: StepShapes,
        steps: int | None,
        checkpointing: Checkpointing | None,
    ) -> None:
        self._sequence_runner, self._scheduler, self._endings = sequence_runner, scheduler, endings
        self._shapes, self._checkpointing = shapes, checkpointing
        self.retreat = Retreat(
            shapes.token_buckets,
            shapes.decode_rows,
            whole=sequence_runner.runner.model.whole_prompts,
            refusal=sequence_runner.runner.refusal,
        )
        self.bursts = Bursts(sequence_runner.runner, shapes, self.retreat, steps)
        self.flights: deque[Flight] = deque()
        """What was sent and not read, the oldest first."""
        self.steps = 0
        """Sent so far."""

    def launch(self, plan: StepPlan) -> None:
        """Prepares the cache for a plan, and sends a step of whom nothing failed for.

        Raises:
            CachePoisoned: the cache is lost.
            STEP_FAILURES: the step failed before it began, and not for its size.
        """
        for sequence, error in prepare(self._sequence_runner, plan):
            self._endings.put_off(sequence, error)
        parts = [part for part in plan.parts if part.sequence.status == RUNNING]
        if parts:
            self._dispatch(parts, plan.steps)

    def shape(self, parts: Sequence[Part]) -> StepSpec:
        """Returns the shape of the program that runs one step of these parts."""
        total = max(part.sequence.reserved for part in parts)
        features = union([part.sequence.features for part in parts])
        new_tokens = sum(part.count for part in parts)
        needed = self._shapes.choose(
            len(parts),
            new_tokens,
            features,
            total_tokens=total,
            mixed=any(part.count == 0 for part in parts),
            fresh=not any(part.start for part in parts),
        )
        fitting = self._sequence_runner.runner.fit(needed)
        # A larger program that is compiled already is no help where that one was too large.
        if self.retreat.avoids(fitting) and not self._sequence_runner.runner.programs.strict:
            return needed
        return fitting

    def _dispatch(self, planned: list[Part], steps: int) -> None:
        """Sends a step of these to the device, or several, or one of some of them if all would be too many."""
        shape = self.bursts.shape(planned) if steps > 1 else None
        if shape is not None and self._try_burst(planned, shape):
            return
        if steps > 1:
            planned = [single(part) for part in planned]
        parts, shape = self.retreat.cut(planned, self.shape)
        if len(parts) < len(planned):
            self._scheduler.postpone([part.sequence for part in planned[len(parts) :]])
        if self.retreat.avoids(shape):
            error = self.retreat.give_up(parts[0], shape)
            if error is not None:
                self._endings.fail(parts[0].sequence, error)
                return
        self._try(parts, shape)
        if self.flights and self.bursts.looks_at(shape):
            self.flights[-1].ask()
            if len(self.flights) > 1 and self.flights[-2].shape == shape:
                self.bursts.note(shape, idle=self.flights[-2].is_done)

    def _try_burst(self, parts: Sequence[Part], shape: StepSpec) -> bool:
        """Sends several steps as one; returns False if they must go one by one, for whose fault it is shows there."""
        try:
            self._try(parts, shape)
        except STEP_FAILURES as error:
            if is_fatal(error):
                raise
            self.bursts.give_up(shape, error)
            return False
        return True

    def _try(self, parts: Sequence[Part], shape: StepSpec) -> None:
        """Sends a step, or notes that its shape was too much for the memory."""
        try:
            flight = self._send(parts, shape)
        except CachePoisoned as error:
            self.retreat.note_failure(shape, error, lost=True)
            raise
        except STEP_FAILURES as error:
            if is_fatal(error) or not self.retreat.note_failure(shape, error, lost=False):
                raise
            _LOG.warning("a step of %d rows failed, a smaller one is next: %r", len(parts), error)
            return
        self._scheduler.dispatched(parts)
        self.flights.append(flight)
        self.steps += shape.steps

    def _send(self, parts: Sequence[Part], shape: StepSpec) -> Flight:
        keeps = self._checkpointing
        snapshots = () if keeps is None else keeps.take(parts, shape)
        try:
            out = self._sequence_runner.step(shape, columns_of_parts(parts, shape, snapshots))
        except BaseException:
            if keeps is not None:
                keeps.drop(snapshots, parts)
            raise
        epochs = tuple(part.sequence.epoch for part in parts)
        return Flight(tuple(parts), epochs, shape, out, snapshots)

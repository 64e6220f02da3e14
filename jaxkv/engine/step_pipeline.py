"""The step pipeline: dispatches planned steps to the device and receives their sampled tokens in order.

A plan is sent as several decode steps in one program, as one step, or as a smaller step after an out-of-memory error.
A step that has rows with a grammar is sent as two programs; the second one, `sample`, needs the tokens of the step
before.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax

from jaxkv.engine.finish import Finisher
from jaxkv.engine.recovery import is_fatal
from jaxkv.engine.request_state import RUNNING
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.speculation.speculation import Speculation
from jaxkv.engine.state_checkpoints import StateCheckpoints
from jaxkv.engine.steps.in_flight import InFlightStep, UnsampledStep, step_rows_of
from jaxkv.engine.steps.prepare import prepare
from jaxkv.engine.steps.step_plan import (
    Part,
    PartColumns,
    StepPlan,
    columns_of,
    first_step,
    token_masks_of,
)
from jaxkv.engine.steps.step_sizes import StepSizes
from jaxkv.errors import STEP_FAILURES, CachePoisoned
from jaxkv.runner.program_specs import StepSpec
from jaxkv.runner.rows import num_masks
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.runner.sampled_rows import SampledRows
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.sampling.features import union

_LOG = logging.getLogger(__name__)


class StepPipeline:
    """Sends the steps of one engine, and holds them until they are received.

    Args:
        sequence_runner: runs the steps.
        scheduler: records which parts were dispatched, and plans the others again.
        finisher: ends requests that fit in no step.
        sizes: chooses the programs of steps.
        state_checkpoints: allocates pending state checkpoints; `None` if the engine keeps none.
        speculation: drafts behind steps that verify drafts; `None` for none.

    Attributes:
        steps: number of steps sent so far.
        wait_seconds: time that `receive` has waited for the device.
        must_receive: the last plan was not sent, because it needs the tokens of the steps in flight.
    """

    def __init__(
        self,
        sequence_runner: SequenceRunner,
        scheduler: Scheduler,
        finisher: Finisher,
        sizes: StepSizes,
        state_checkpoints: StateCheckpoints | None,
        speculation: Speculation | None = None,
    ) -> None:
        self._sequence_runner, self._runner = sequence_runner, sequence_runner.runner
        self._scheduler, self._finisher, self._shapes = scheduler, finisher, sizes.shapes
        self._multi_step, self._oom_backoff = sizes.multi_step, sizes.oom_backoff
        self._state_checkpoints, self._speculation = state_checkpoints, speculation
        self._in_flight: deque[InFlightStep] = deque()
        # The last step sent, if its tokens are not sampled yet.
        self._unsampled: UnsampledStep | None = None
        self.steps = 0
        self.wait_seconds = 0.0
        self.must_receive = False

    @property
    def num_in_flight(self) -> int:
        """Steps that were sent and are not received yet; several decode steps in one program count as one."""
        return len(self._in_flight) + (self._unsampled is not None)

    @property
    def may_sample(self) -> bool:
        """Whether a step waits for `sample`, and all steps before it were received."""
        return self._unsampled is not None and not self._in_flight

    @property
    def is_verifying(self) -> bool:
        """Whether a step in flight verifies drafts, so that the lengths of its requests are not known yet."""
        return any(step.shape.drafts for step in self._in_flight)

    def receive(self) -> tuple[InFlightStep, list[SampledRows]]:
        """Waits for the oldest program in flight, and returns it with the sampled tokens of each of its steps.

        Raises:
            JaxRuntimeError: the program failed on the device, and the cache is lost.
        """
        step, began = self._in_flight.popleft(), time.perf_counter()
        self.must_receive = False
        try:
            packed = self._runner.read(step.out)
        except jax.errors.JaxRuntimeError as error:
            self._oom_backoff.note_failure(step.shape, error, lost=True)
            raise
        self.wait_seconds += time.perf_counter() - began
        self._oom_backoff.note_success(step.shape)
        return step, step.unpack(packed)

    def clear(self) -> None:
        """Drops all programs in flight; their results are never read."""
        self._in_flight.clear()
        self._unsampled = None
        self.must_receive = False

    def sample(self) -> None:
        """Samples the tokens of the step that waits for it, by masks that must be up to date.

        If that fails, the step is dropped, and its requests must be requeued. They fail if that happens to them twice
        for another reason than the size of the step.

        Raises:
            CachePoisoned: the cache is lost.
            STEP_FAILURES: the program could not be dispatched; the cache is as it was.
        """
        unsampled, self._unsampled = self._unsampled, None
        assert unsampled is not None, "a step waits for its tokens"
        step, (parts, masks) = unsampled.step, unsampled.settled()
        assert step.sampler is not None, "a step in two programs has a sampler"
        sampler = self._shapes.sampler(step.shape, step.sampler.features, num_masks(masks))
        if not self._runner.may_run(sampler):
            sampler = step.sampler
        try:
            out = self._sequence_runner.sample(sampler, unsampled.arrays, masks)
        except CachePoisoned as error:
            self._oom_backoff.note_failure(step.shape, error, lost=True)
            raise
        except STEP_FAILURES as error:
            if not self._oom_backoff.note_failure(step.shape, error, lost=False):
                self._finisher.fail_if_retried([part.sequence for part in parts], error)
            raise
        self._in_flight.append(replace(step, parts=parts, out=out, sampler=sampler))

    def send(self, plan: StepPlan) -> None:
        """Prepares the cache for a plan, and sends a step of the requests whose preparation succeeded.

        Raises:
            CachePoisoned: the cache is lost.
            STEP_FAILURES: the step could not be dispatched, for another reason than its size.
        """
        parts: Sequence[Part] = plan.parts
        failures = prepare(self._sequence_runner, plan)
        for sequence, error in failures:
            self._finisher.requeue_once(sequence, error)
        if failures:
            parts = [part for part in parts if part.sequence.status == RUNNING]
        if parts:
            self._dispatch(parts, plan.steps)

    def shape(self, parts: Sequence[Part]) -> StepSpec:
        """Returns the spec of the program that runs one step of these parts, or of the first of two."""
        columns = columns_of(parts)
        sequences, starts, counts, *_ = columns
        choose = partial(
            self._shapes.choose,
            len(parts),
            sum(counts),
            union([sequence.features for sequence in sequences]),
            total_tokens=max([sequence.reserved for sequence in sequences]),
            mixed=0 in counts,
            fresh=not any(starts),
        )
        if min(counts) == max(counts) == 1 and self._shares(columns):
            sharing = self._runner.fit(choose(shares=True))
            if self._may_share_in(sharing):
                return sharing
        needed = choose()
        fitting = self._runner.fit(needed)
        # If the compiled program ran out of memory, a smaller one is compiled instead.
        may_compile = not self._runner.programs.strict or self._runner.programs.is_pending(needed)
        if self._oom_backoff.avoids(fitting) and may_compile:
            return needed
        return fitting

    def _shares(self, columns: PartColumns) -> bool:
        """Returns whether a decode step should read keys once with which several of its rows begin."""
        numbers = [sequence.number for sequence in columns.sequences]
        return self._shapes.may_share(len(numbers)) and self._sequence_runner.shares_keys(
            numbers, columns.starts
        )

    def _may_share_in(self, fitting: StepSpec) -> bool:
        """Returns whether a program is one that reads shared keys once, and may run; else another one runs the step."""
        if not fitting.shares or self._oom_backoff.avoids(fitting):
            return False
        return self._runner.may_run(fitting)

    def _dispatch(self, planned: Sequence[Part], steps: int) -> None:
        """Sends the parts as one program of several tokens per row, as one step, or as the largest step not avoided.

        Parts that are left out run in the next step. A request for which even the smallest step is avoided fails.
        """
        # Without speculation there are no drafts to look for.
        drafting = self._speculation is not None
        several = drafting and any(part.drafts for part in planned)
        if several:
            shape = self._verify_shape(planned)
        else:
            several = steps > 1
            shape = None
            if several:
                shares = self._shares(columns_of(planned))
                shape = self._multi_step.shape(planned, shares=shares)
        if shape is not None and self._send_several(planned, shape):
            return
        if drafting and any(part.sequence.unread_drafts for part in planned):
            # Only the device knows where these rows are, and only a program that verifies drafts asks it.
            self.must_receive = True
            return
        if several:
            planned = [first_step(part) for part in planned]
        parts, shape = self._oom_backoff.cut(planned, self.shape)
        if len(parts) < len(planned):
            self._scheduler.plan_next([part.sequence for part in planned[len(parts) :]])
        if self._oom_backoff.avoids(shape):
            error = self._oom_backoff.give_up(parts[0], shape)
            if error is not None:
                self._finisher.fail(parts[0].sequence, error)
                return
        self._send_or_record(parts, shape)
        if self._in_flight and self._multi_step.measures(shape):
            self._in_flight[-1].start_copy_to_host()
            if len(self._in_flight) > 1 and self._in_flight[-2].shape == shape:
                self._multi_step.record(shape, idle=self._in_flight[-2].is_done)

    def _verify_shape(self, parts: Sequence[Part]) -> StepSpec | None:
        """Returns the program that verifies the drafts of these parts; `None` to send them without drafts."""
        columns = columns_of(parts)
        sequences = columns.sequences
        # It is one program, so it needs all masks now.
        if not all(one.has_mask for one in sequences):
            return None
        features = union([sequence.features for sequence in sequences])
        needed = self._runner.fit(
            self._shapes.verify(
                len(parts),
                max(map(len, columns.drafts)),
                features,
                total_tokens=max([sequence.reserved for sequence in sequences]),
                masks=num_masks(token_masks_of(columns)) if features.grammar else 0,
            )
        )
        if not self._runner.may_run(needed):
            return None
        return None if self._multi_step.avoids(needed) else needed

    def _send_several(self, parts: Sequence[Part], shape: StepSpec) -> bool:
        """Sends several tokens per row in one program; returns False if that failed and one each must be sent."""
        try:
            self._send_or_record(parts, shape)
        except STEP_FAILURES as error:
            if is_fatal(error):
                raise
            self._multi_step.send_singly(shape, error)
            return False
        return True

    def _send_or_record(self, parts: Sequence[Part], shape: StepSpec) -> None:
        """Sends a step; records an out-of-memory error, or a refused program, instead of raising it."""
        try:
            step = self._run(parts, shape)
        except CachePoisoned as error:
            self._oom_backoff.note_failure(shape, error, lost=True)
            raise
        except STEP_FAILURES as error:
            if is_fatal(error) or not self._oom_backoff.note_failure(shape, error, lost=False):
                raise
            _LOG.warning(
                "a step of %d rows failed; a smaller one is tried next: %r", len(parts), error
            )
            return
        self._scheduler.dispatched(parts, drafts_next=shape.drafter is not None)
        if isinstance(step, UnsampledStep):
            self._unsampled = step
        else:
            self._in_flight.append(step)
        self.steps += shape.steps
        if shape.drafter is not None and self._speculation is not None:
            self._speculation.follow(parts)

    def _run(self, parts: Sequence[Part], shape: StepSpec) -> InFlightStep | UnsampledStep:
        """Runs a step, or its first program, with the pending checkpoints that fit; releases them if that fails."""
        sampler, bound = None, ()
        if shape.forward_only:
            bound = _bound(parts)
            sampler = self._sampler(parts, shape, masks=len(bound))
        features = shape.features if sampler is None else sampler.features
        checkpoints, runner = self._state_checkpoints, self._sequence_runner
        pending_checkpoints = () if checkpoints is None else checkpoints.take_pending(parts, shape)
        arrays = None
        try:
            rows = step_rows_of(parts, shape, pending_checkpoints, features)
            if sampler is None:
                out = runner.step(shape, rows)
            else:
                out, arrays = runner.forward(shape, sampler, rows)
        except BaseException:
            if checkpoints is not None:
                checkpoints.drop_pending(pending_checkpoints, parts)
            raise
        step = InFlightStep(
            parts=tuple(parts),
            epochs=tuple([part.sequence.epoch for part in parts]),
            shape=shape,
            out=out,
            weight_version=self._runner.weight_version,
            pending_checkpoints=pending_checkpoints,
            sampler=sampler,
        )
        return step if arrays is None else UnsampledStep(step, arrays, bound)

    def _sampler(self, parts: Sequence[Part], shape: StepSpec, *, masks: int) -> SampleSpec:
        """Returns the second program of a step, with room for all the masks that it may need.

        Raises:
            ProgramRefused: strict mode has none; found before the first program runs.
        """
        features = union([part.sequence.features for part in parts])
        sampler = self._runner.fit(self._shapes.sampler(shape, features, masks))
        if self._runner.programs.is_closed:
            self._runner.program(sampler)
        return sampler


def _bound(parts: Sequence[Part]) -> tuple[int, ...]:
    """Returns the indices of the parts that sample a token under a grammar."""
    return tuple(
        [
            index
            for index, part in enumerate(parts)
            if part.sequence.constraint is not None and part.emits
        ]
    )

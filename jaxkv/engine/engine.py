"""The loop that serves many requests at once: plan, pack, dispatch, and only then read what the step before chose.

It owns the order of effects. What a step computed counts when its tokens have been read and found good: only then
are pages offered to others, tokens handed out and pages given back.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many

import jax

from jaxkv.cache.prefix import PrefixIndex
from jaxkv.engine.emission import accept, end
from jaxkv.engine.engine_config import EngineConfig
from jaxkv.engine.executor import Executor
from jaxkv.engine.flight import Flight, report, row_of
from jaxkv.engine.preparation import prepare
from jaxkv.engine.recovery import STEP_FAILURES, RebuildLimit, is_fatal, refuse_broken
from jaxkv.engine.request import Request
from jaxkv.engine.results import SampledRows, unpack_sampled
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.sequence import FINISHED, RUNNING, Sequence, new_sequence
from jaxkv.engine.step_plan import Part
from jaxkv.engine.step_shapes import StepShapes
from jaxkv.errors import CachePoisoned
from jaxkv.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


class Engine:
    """Serves requests that come and go over one executor. One thread uses it.

    Args:
        executor: runs the steps; its cache should be used by nobody else for long.
        tokenizer: for stop strings, and for text that is read as it comes.
        config: how to serve.
        clock: returns seconds; must not jump.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.executor = executor
        layout, limits = executor.layout, executor.shapes
        whole = executor.model.whole_prompts
        budget = max(limits.max_rows, min(config.token_budget, limits.token_buckets[-1]))
        self.shapes = StepShapes(
            layout,
            max_tokens=limits.length_buckets[-1],
            max_rows=limits.max_rows,
            token_budget=budget,
            whole_prompts=whole,
            pinned=config.pinned_shapes,
        )
        self.prefix = None
        if config.prefix_cache:
            self.prefix = PrefixIndex(layout, executor.accounts, identity=repr(executor.model))
        self._page_sizes = {group.page_size for group in layout.paged_groups}
        self.scheduler = Scheduler(
            executor.accounts,
            self.prefix,
            page_size=min(self._page_sizes, default=64),
            max_rows=limits.max_rows,
            token_budget=budget,
            whole_prompts=whole,
            fill=self.shapes.fill,
        )
        self.steps = self.recoveries = 0
        """Steps dispatched; caches lost and replaced."""
        self._tokenizer = tokenizer
        self._clock = clock
        self._limit = RebuildLimit(config.most_rebuilds, config.rebuild_seconds, clock)
        self._flights: deque[Flight] = deque()
        self._stepping = threading.Lock()
        self._rebuilds = executor.owner.rebuilds

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan, or to read."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._flights)

    def add(self, samples: Many[Request], *, streamed: bool = False) -> list[Sequence]:
        """Queues the samples of one prompt, and returns one sequence for each, which fill as `step` is called.

        Args:
            samples: requests of one prompt.
            streamed: keep `pieces` for somebody who takes them.

        Raises:
            ValueError: it can never fit, or stop strings are asked of a model without a tokenizer.
        """
        for request in samples:
            self.check(request)
        made = [
            new_sequence(
                request,
                number=self.executor.new_number(),
                tokenizer=self._tokenizer,
                streamed=streamed,
                now=self._clock(),
            )
            for request in samples
        ]
        for sequence in made[1:]:
            self.scheduler.follow(made[0], sequence)
        self.scheduler.add(made[0])
        return made

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence now, in whatever state it is; one that has ended already stays as it is."""
        if sequence.status != FINISHED:
            self._finish(sequence, "abort")

    def step(self) -> None:
        """Dispatches the next step, then reads the one before.

        Raises:
            OutOfPages: nothing runs and what waits first gets no pages, because others hold them (`OutOfStates`).
            CachePoisoned, JaxRuntimeError: the cache was lost too often, or the device is broken.
            RuntimeError: another thread is in the middle of a step.
        """
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("one thread at a time steps an engine; see jaxkv.AsyncLLM")
        try:
            self.refresh()
            launched = self._launch()
            ahead = 1 if self.config.overlap and launched else 0
            while len(self._flights) > ahead:
                self._collect(self._flights.popleft())
                launched = True
        except BaseException:
            self._requeue()
            raise
        finally:
            self._stepping.release()
        if not launched and self.scheduler.shortage is not None:
            raise self.scheduler.shortage

    def run(self, sequences: Many[Sequence]) -> None:
        """Steps until all of these have ended; aborts them if that is interrupted."""
        try:
            while any(sequence.status != FINISHED for sequence in sequences):
                self.step()
        finally:
            for sequence in sequences:
                self.abort(sequence)

    def check(self, request: Request) -> None:
        """Raises `ValueError` with the numbers if a request can never be served."""
        params = request.params
        needed = len(request.prompt) + params.max_tokens - 1
        held = self.executor.accounts.max_tokens
        most = min(self.shapes.lengths[-1], self.shapes.lengths[-1] if held is None else held)
        if needed > most:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens with max_tokens={params.max_tokens} needs room for "
                f"{needed} tokens, but one sequence can have {most}; shorten it or give the cache more memory"
            )
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which this model directory lacks")

    def _launch(self) -> bool:
        """Plans and dispatches a step; returns whether there was anything to do."""
        plan = self.scheduler.plan()
        if plan.is_empty:
            return False
        try:
            for sequence, error in prepare(self.executor, plan):
                self._fail(sequence, error)
            parts = [part for part in plan.parts if part.sequence.status == RUNNING]
            if parts:
                self._dispatch(parts)
        except CachePoisoned as error:
            self._recover(error)
        except STEP_FAILURES as error:
            if is_fatal(error):
                self._recover(error)
            self._blame([part.sequence for part in plan.parts], error)
        return True

    def _dispatch(self, parts: list[Part]) -> None:
        rows = [row_of(part) for part in parts]
        total = max(part.sequence.reserved for part in parts)
        shape = self.executor.fit(self.shapes.declare(rows, total_tokens=total)).shape
        out = self.executor.step(shape, rows)
        self.scheduler.dispatched(parts)
        flown = tuple((part, part.sequence.epoch) for part in parts)
        self._flights.append(Flight(flown, out, shape.features))
        self.steps += 1

    def _collect(self, flight: Flight) -> None:
        try:
            packed = self.executor.read(flight.out)
        except jax.errors.JaxRuntimeError as error:
            self._recover(error)
            return
        rows = unpack_sampled(packed, flight.features)
        tokens, finite = rows.tokens.tolist(), rows.finite.tolist()
        for index, (part, epoch) in enumerate(flight.parts):
            if part.sequence.epoch == epoch:
                good = bool(finite[index])
                self._collect_row(part, tokens[index] if good else None, index, rows)

    def _collect_row(self, part: Part, token: int | None, index: int, rows: SampledRows) -> None:
        """Takes one row's result; `token` is `None` if its logits were not finite."""
        sequence = part.sequence
        sequence.collected = part.start + part.count
        sequence.tainted = sequence.tainted or token is None
        if part.emits:
            sequence.pending -= 1
            if token is None:
                _LOG.error("a request failed: its logits were not finite")
                self._finish(sequence, "error")
                return
            try:
                accept(sequence, token, report(sequence, token, index, rows))
            except STEP_FAILURES as error:
                self._fail(sequence, error)
                return
            if sequence.started is None:
                sequence.started = self._clock()
        self._publish(sequence)
        if sequence.reason is not None:
            self._drop(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Offers the pages that are full and known to be good to those that begin alike.

        The index is also told of what a sequence computes first, to count whether it began with a hit.
        """
        if self.prefix is None or sequence.keys is None or sequence.tainted:
            return
        before, after = sequence.published, sequence.collected
        filled = any(after // size > before // size for size in self._page_sizes)
        if filled or sequence.keys.begun is not None:
            self.prefix.publish(sequence.number, sequence.tokens, sequence.keys, sequence.collected)
            sequence.published = sequence.collected

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        _LOG.error("a request failed alone: %r", error)
        sequence.error = error
        self._finish(sequence, "error")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        if sequence.tainted and self.prefix is not None and sequence.status == RUNNING:
            self.prefix.withdraw(sequence.number)
        try:
            end(sequence, reason)
        except STEP_FAILURES as error:
            _LOG.error("the last text of a request is lost: %r", error)
            sequence.stream = None
            end(sequence, reason)
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self.scheduler.drop(sequence)
        sequence.ended = self._clock()

    def _blame(self, sequences: list[Sequence], error: Exception) -> None:
        """A step failed before it began: its one row is at fault, or each row must show in a step of its own."""
        running = [sequence for sequence in sequences if sequence.status == RUNNING]
        if len(running) == 1:
            self._fail(running[0], error)
        else:
            _LOG.warning("a step of %d rows failed, each runs alone: %r", len(running), error)
            self.scheduler.isolate(running)

    def refresh(self) -> None:
        """Notices that others lost or replaced the cache, and forgets what was in it; `step` begins with this.

        Raises:
            CachePoisoned, JaxRuntimeError: the cache was lost too often, or the device is broken.
        """
        owner = self.executor.owner
        if owner.poisoned:
            refuse_broken(owner.cause)
            self._recover(CachePoisoned("the cache was lost by another use of it"))
        elif owner.rebuilds != self._rebuilds:
            self._forget()

    def _recover(self, error: Exception) -> None:
        """Replaces a lost cache; everybody is computed again from the tokens the host has."""
        owner = self.executor.owner
        if is_fatal(error) and not owner.poisoned:
            owner.poison(f"the device is broken: {error}", cause=error)
        if is_fatal(error) or not self._limit.allows():
            raise error
        _LOG.warning("the cache was lost and is built anew: %r", error)
        owner.rebuild()
        self._forget()
        self.recoveries += 1

    def _forget(self) -> None:
        """Begins again with the empty cache that took the place of a lost one."""
        self._requeue()
        if self.prefix is not None:
            self.prefix.clear()
        self._rebuilds = self.executor.owner.rebuilds

    def _requeue(self) -> None:
        """Forgets what is under way; everybody is computed again."""
        self._flights.clear()
        self.scheduler.requeue_all()

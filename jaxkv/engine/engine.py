"""The engine loop: plan a step, dispatch it, then read the results of the step before.

The engine orders all side effects. A step takes effect when the host has read its tokens and its logits were finite:
only then are tokens returned, pages published to the prefix index and pages released.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv.cache.integrity import IdleCheck
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.config.checks import as_int
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.collect import Collector
from jaxkv.engine.finish import Finisher
from jaxkv.engine.host_tier.host_cache import HostCache
from jaxkv.engine.lora.adapters import Adapters
from jaxkv.engine.lora.loaded_adapter import LoadedAdapter
from jaxkv.engine.prefix_reuse import PrefixReuse
from jaxkv.engine.recovery import CacheRecovery, RebuildLimit, is_fatal, refuse_broken
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import FINISHED, RequestState, new_request_state
from jaxkv.engine.routed_experts import open_experts
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.speculation.drafter import Drafter
from jaxkv.engine.speculation.open_speculation import open_speculation
from jaxkv.engine.step_pipeline import StepPipeline
from jaxkv.engine.steps.step_sizes import open_step_sizes
from jaxkv.engine.token_masks import update_masks
from jaxkv.errors import STEP_FAILURES, CachePoisoned
from jaxkv.memory import named_exhaustion
from jaxkv.models.protocol import Params
from jaxkv.runner.scoring import prompt_logprobs, score_texts
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_AFTER_UPDATE = ("continue", "recompute")


class Engine:
    """Serves requests over one cache with continuous batching. Only one thread may use it at a time.

    Args:
        sequence_runner: runs the steps.
        tokenizer: needed for stop strings and for streamed text.
        config: engine options.
        host_bytes: host memory for evicted prefixes, in bytes; 0 for no host tier.
        clock: returns seconds; must be monotonic.
        drafter: drafts, with speculation; `None` for the one of its method that needs no weights.

    Attributes:
        config: engine options.
        sequence_runner: runs the steps.
        runner: runs the programs.
        shapes: padded shapes of the steps.
        prefix_reuse: the prefixes that are kept for later requests.
        oom_backoff: shapes that ran out of memory.
        multi_step: decides when several decode steps are sent as one program.
        scheduler: plans the steps.
        experts: reads the experts chosen for a request's tokens; `None` if the cache keeps none.
        asleep: whether `sleep` has given the cache's memory back.
        adapters: the low-rank adapters that requests may name.
        speculation: drafts tokens that decode steps verify; `None` for none.
    """

    def __init__(
        self,
        sequence_runner: SequenceRunner,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        host_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.sequence_runner = sequence_runner
        self.runner = runner = sequence_runner.runner
        if config.batch_invariant and not runner.model.batch_invariant:
            raise ValueError(
                f"batch_invariant needs a model with it, got {type(runner.model).__name__} without; give the runner "
                "replace(model, batch_invariant=True)"
            )
        self.adapters = Adapters(runner.adapters)
        allocator, layout = sequence_runner.allocator, runner.layout
        self.prefix_reuse = reuse = PrefixReuse(sequence_runner, config, host_bytes)
        checkpoints = reuse.state_checkpoints
        sizes = open_step_sizes(sequence_runner, config, checkpoints=checkpoints is not None)
        self.shapes, self.multi_step = sizes.shapes, sizes.multi_step
        self.oom_backoff = sizes.oom_backoff
        self.speculation = open_speculation(
            runner.model, layout, self.shapes, config.speculation, clock, drafter
        )
        page_sizes = {group.page_size for group in layout.paged_groups}
        self.scheduler = Scheduler(
            allocator,
            reuse.index,
            page_size=min(page_sizes, default=64),
            max_rows=sequence_runner.max_rows,
            token_budget=self.shapes.token_budget,
            whole_prompts=runner.model.whole_prompts,
            fill=self.shapes.fill,
            chunk_size=layout.chunk_size,
            most_steps=self.multi_step.chosen.number,
            most_rows_at_once=self.multi_step.chosen.most_rows,
            prefetch=reuse.prefetch,
            speculation=self.speculation,
        )
        self._finisher = Finisher(self.scheduler, reuse.index, clock)
        self._pipeline = StepPipeline(
            sequence_runner, self.scheduler, self._finisher, sizes, checkpoints, self.speculation
        )
        self.experts = open_experts(sequence_runner)
        self._collector = Collector(
            allocator, reuse.index, page_sizes, clock, checkpoints, self.experts, self.speculation
        )
        self._tokenizer = tokenizer
        self._clock = clock
        limit = RebuildLimit(config.most_rebuilds, config.rebuild_seconds, clock)
        self._recovery = CacheRecovery(runner.owner, limit)
        self._stepping = threading.Lock()
        self._idle_check = IdleCheck(allocator, reuse.index, clock)
        self.asleep = False

    @property
    def prefix(self) -> PrefixIndex | None:
        """The prefix index; `None` if the prefix cache is off."""
        return self.prefix_reuse.index

    @property
    def host(self) -> HostCache | None:
        """The host tier; `None` if there is none."""
        return self.prefix_reuse.host

    @property
    def recoveries(self) -> int:
        """Number of lost caches that were replaced."""
        return self._recovery.count

    @property
    def steps(self) -> int:
        """Number of dispatched steps."""
        return self._pipeline.steps

    @property
    def wait_seconds(self) -> float:
        """Time that steps have waited for the device; the rest of a busy engine's time is the host's."""
        return self._pipeline.wait_seconds

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or a step is in flight; False while the engine sleeps."""
        return not self.asleep and bool(
            self.scheduler.waiting or self.scheduler.running or self._pipeline.num_in_flight
        )

    def add(
        self, samples: Sequence[Request], *, streamed: bool = False, as_text: bool = True
    ) -> list[RequestState]:
        """Queues the samples of one prompt; returns one state for each, which `step` updates.

        Args:
            samples: requests of one prompt.
            streamed: keep `pieces` for a caller that reads them.
            as_text: decode the tokens of streamed requests and of those with stop strings. False for a caller that
                decodes them itself.

        Raises:
            ValueError: a request can never fit the cache, or it has stop strings and the model has no tokenizer.
            OutOfPages, OutOfStates: others hold the pages that `prompt_logprobs` need now; nothing was queued.
            CachePoisoned, JaxRuntimeError: as for `step`, with `prompt_logprobs`.
            RuntimeError: the engine sleeps, or `prompt_logprobs` have lost the cache twice; nothing was queued.
        """
        self.refuse_if_asleep()
        for request in samples:
            self.check(request)
        first, top, scores = samples[0].prompt, samples[0].params.prompt_logprobs, None
        if top is not None:
            slot = samples[0].adapter_slot
            scores = self._between_steps(
                lambda: prompt_logprobs(self.sequence_runner, first, top, adapter_slot=slot)
            )
        states = [
            new_request_state(
                request,
                number=self.sequence_runner.new_number(),
                tokenizer=self._tokenizer if as_text else None,
                streamed=streamed,
                now=self._clock(),
            )
            for request in samples
        ]
        states[0].prompt_logprobs = scores
        for sequence in states[1:]:
            self.scheduler.add_sample(states[0], sequence)
        self.scheduler.add(states[0])
        return states

    def score_text(self, text: tuple[int, ...], lora: str | None = None) -> np.ndarray:
        """Returns the log-probability of each token of a text after the first, float32, computed between two steps.

        Args:
            text: token ids.
            lora: name of the adapter that computes them; `None` for the model alone.

        Raises:
            ValueError: no such adapter is loaded.
            OutOfPages, OutOfStates: others hold the pages that it needs now.
            CachePoisoned, JaxRuntimeError: as for `step`.
            RuntimeError: the engine sleeps, or the scores have lost the cache twice.
        """
        self.refuse_if_asleep()
        adapter = self.adapters.of(lora)
        slot = 0 if adapter is None else adapter.slot
        [scores] = self._between_steps(
            lambda: [*score_texts(self.sequence_runner, [text], adapter_slot=slot)]
        )
        return scores

    def _between_steps[T](self, compute: Callable[[], T]) -> T:
        """Returns what is computed between two steps, at the second try if the first one loses the cache.

        Requests in progress are computed again then.

        Raises:
            CachePoisoned, JaxRuntimeError: the cache was lost too often, or the device is broken.
            RuntimeError: it has lost the cache twice, which was replaced each time.
        """
        self.refresh()
        for is_last in (False, True):
            try:
                return compute()
            except (CachePoisoned, jax.errors.JaxRuntimeError) as error:
                if not self.runner.owner.poisoned:
                    raise
                self._recover(error)
                if is_last:
                    raise RuntimeError(
                        f"log-probabilities of a given text have lost the cache twice: {error}"
                    ) from error
        raise AssertionError("the last try returns or raises")

    def abort(self, sequence: RequestState) -> None:
        """Ends a request in any state; does nothing if it has ended."""
        if sequence.status != FINISHED:
            self._finisher.finish(sequence, "abort")

    def update_weights(
        self,
        params: Params | Iterable[tuple[str, Any]],
        *,
        version: WeightVersion | None = None,
        requests: str = "continue",
    ) -> WeightVersion:
        """Replaces the parameters between two steps; drops what the old ones have cached.

        Args:
            params: the new parameters, see `ModelRunner.update_params`.
            version: their version; the number of the last one plus 1 if not given. Returned.
            requests: what requests in progress do, "continue" or "recompute", see `LLM.update_weights`.

        Raises:
            ValueError: the parameters do not fit, or an option is unknown; nothing was changed.
            OutOfMemory: there is no memory for the new parameters; nothing was changed.
            CachePoisoned, JaxRuntimeError: a step in flight has failed, and the cache was lost too often, or the device
                is broken.
        """
        if requests not in _AFTER_UPDATE:
            raise ValueError(
                f"requests must be one of {', '.join(_AFTER_UPDATE)}, got {requests!r}"
            )
        version = _next_version(self.runner.weight_version, version)
        with named_exhaustion("updating the weights"):
            self.runner.update_params(params, version)
        if self.speculation is not None:
            self.speculation.drop_shared()
        # At once, so that nothing of the old weights stays if what follows fails.
        self.clear_prefixes()
        if requests == "recompute":
            try:
                self._receive_all()
            finally:
                self._requeue()
        return version

    def clear_prefixes(self) -> None:
        """Empties the prefix cache, on the host too. Requests in progress keep their pages."""
        self.prefix_reuse.clear()

    @property
    def repeats_bits(self) -> bool:
        """Whether a request's bits are the same beside any others, in any chunks and from any prefix.

        Recurrent layers scan the tokens of a prompt and step those of a reply, which pinned shapes do not change.
        """
        is_pinned = self.shapes.pinned and not self.runner.layout.state_groups
        return is_pinned or self.runner.model.batch_invariant

    @property
    def adapters_in_use(self) -> list[LoadedAdapter]:
        """The adapter of each request that has one and has not ended."""
        states = (*self.scheduler.waiting, *self.scheduler.running)
        return [one for state in states if (one := state.request.adapter) is not None]

    def sleep(self, level: int = 1) -> None:
        """Gives the memory of the cache back; requests in progress wait until `wake_up` and are then computed again.

        All that the device had cached is lost; prefixes on the host stay. It may be called again with a higher level.

        Args:
            level: 1 for the cache, 2 for the parameters too; then `update_weights` must give others before `wake_up`.

        Raises:
            ValueError: the level is neither 1 nor 2.
            CacheLeased: another framework uses the cache; the engine stays awake.
            CachePoisoned, JaxRuntimeError: as for `step`.
        """
        level = as_int("level", level, 1, 2)
        if not self.asleep:
            self.refresh()
            self.runner.owner.handle()
            try:
                self._receive_all()
            finally:
                self._start_over()
            self.runner.owner.close()
            if self.speculation is not None:
                self.speculation.release()
            self.asleep = True
        if level == 2:
            self.runner.drop_params()

    def wake_up(self) -> None:
        """Makes the cache again, empty, after `sleep`. Nothing is compiled. Does nothing if the engine is awake.

        Raises:
            RuntimeError: `sleep` has dropped the parameters, and no others were given since.
            OutOfMemory: the memory is not free any more; the engine still sleeps.
        """
        if not self.asleep:
            return
        self.runner.refuse_without_params()
        self.runner.owner.rebuild()
        self._recovery.notice()
        self.asleep = False

    def refuse_if_asleep(self) -> None:
        """Raises `RuntimeError` if the engine sleeps."""
        if self.asleep:
            raise RuntimeError(
                "the engine sleeps and has no cache; call wake_up first, or send the request later"
            )

    def close(self) -> None:
        """Aborts all requests and frees the cache and the host tier. The engine cannot be used afterwards."""
        for sequence in (*self.scheduler.waiting, *self.scheduler.running):
            self.abort(sequence)
        self._pipeline.clear()
        self.prefix_reuse.close()
        if self.speculation is not None:
            self.speculation.close()
        self.runner.close()

    def step(self) -> None:
        """Dispatches the next step, then reads the one before.

        Raises:
            OutOfPages, OutOfStates: no request runs, and the first waiting one cannot get its pages because other users
                of the cache hold them.
            CachePoisoned, JaxRuntimeError: the cache was lost too often, or the device is broken.
            RuntimeError: another thread is inside `step`.
        """
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError(
                "two threads called Engine.step at once, but one thread at a time may; use jaxkv.AsyncLLM to serve "
                "requests of several threads"
            )
        try:
            self.refuse_if_asleep()
            self.refresh()
            progressed = self._dispatch_next()
            ahead = 1 if progressed and self._may_overlap() else 0
            while self._pipeline.num_in_flight > ahead:
                self._collect()
                progressed = True
            self._sample()
            progressed = progressed or self._advance_swap_ins(wait=True)
        except BaseException:
            self._requeue()
            raise
        finally:
            self._stepping.release()
        if not progressed and self.scheduler.shortage is not None:
            raise self.scheduler.shortage

    def check_if_idle(self) -> None:
        """Checks the records of pages and states if no request is left and a check is due.

        Streams, and the loop of an `AsyncLLM` and of the server, have handed over all results before. A blocking call
        returns after the check.

        Raises:
            CorruptBooks: two records contradict each other.
        """
        is_idle = not (self.asleep or self.scheduler.waiting or self.scheduler.running)
        if self.config.idle_checks and is_idle:
            self._idle_check.run_if_due()

    def run(
        self, sequences: Sequence[RequestState], after_step: Callable[[], None] | None = None
    ) -> None:
        """Steps until all of these requests have ended, and checks an idle engine; aborts them on an exception.

        Args:
            sequences: the requests.
            after_step: called after each step.

        Raises:
            CorruptBooks: see `check_if_idle`; the other errors are those of `step`.
        """
        left = deque(sequences)
        try:
            while left:
                if left[0].status == FINISHED:
                    left.popleft()
                    continue
                self.step()
                if after_step is not None:
                    after_step()
            self.check_if_idle()
        finally:
            for sequence in sequences:
                self.abort(sequence)

    def check(self, request: Request) -> None:
        """Raises `ValueError` if a request can never be served."""
        params = request.params
        needed = len(request.prompt) + request.max_tokens - 1
        held = self.sequence_runner.allocator.longest(
            frees_out_of_window=not self.runner.model.whole_prompts
        )
        most = min(self.shapes.lengths[-1], self.shapes.lengths[-1] if held is None else held)
        if needed > most:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens with max_tokens={request.max_tokens} needs room for "
                f"{needed} tokens, but one sequence can have {most}; shorten the prompt, lower max_tokens, or give the "
                f"cache more memory"
            )
        self.runner.processors.check(params.logits_processors)
        self.adapters.check(request.adapter)
        if (params.lora is None) != (request.adapter is None):
            raise ValueError(
                "a request with lora needs its loaded adapter; make it by LLM.requests"
            )
        if params.stop and self._tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer, which this model directory lacks; use stop_token_ids"
            )
        if (params.structured_outputs is None) != (request.grammar is None):
            raise ValueError(
                "a request with structured_outputs needs their compiled grammar; make it by LLM.requests"
            )

    def _dispatch_next(self) -> bool:
        """Plans and dispatches a step; returns False if there was nothing to do."""
        if self._pipeline.is_verifying and not self._may_follow():
            self._receive_all()
        self._advance_swap_ins()
        plan = self.scheduler.plan()
        if plan.is_empty:
            # A preempted request has freed pages for the next plan, so this is no shortage.
            return bool(plan.preempted)
        for sequence, _ in plan.new_entries:
            if sequence.admitted is None:
                sequence.admitted = self._clock()
        try:
            self._pipeline.send(plan)
        except CachePoisoned as error:
            self._recover(error)
        except STEP_FAILURES as error:
            if is_fatal(error):
                self._recover(error)
            self._finisher.fail_or_isolate([part.sequence for part in plan.parts], error)
        return True

    def _may_overlap(self) -> bool:
        """Whether the next step may be planned before the last one is read: the first drafts need all its tokens."""
        if self.speculation is None or not self.config.overlap:
            return self.config.overlap
        if self._pipeline.is_verifying:
            return self._may_follow()
        return not self.speculation.is_active(self.scheduler.running)

    def _may_follow(self) -> bool:
        """Whether the next step may verify the drafts that a step in flight makes, before that one is read."""
        speculation, scheduler = self.speculation, self.scheduler
        return (
            speculation is not None
            and self.config.overlap
            and not self._pipeline.must_receive
            and scheduler.only_decodes
            and speculation.may_follow(scheduler.running)
        )

    def _advance_swap_ins(self, *, wait: bool = False) -> bool:
        """Advances the swap-ins in progress; returns False if there are none."""
        try:
            return self.prefix_reuse.advance_swap_ins(wait=wait)
        except CachePoisoned as error:
            self._recover(error)
            return True

    def _receive_all(self) -> None:
        """Receives and collects every program in flight."""
        while self._pipeline.num_in_flight:
            self._collect()

    def _collect(self) -> None:
        """Receives the oldest step in flight, which is sampled first if it was not, and collects its results."""
        if self._pipeline.may_sample:
            self._sample()
            if not self._pipeline.num_in_flight:
                return
        try:
            step, sampled = self._pipeline.receive()
        except jax.errors.JaxRuntimeError as error:
            self._recover(error)
            return
        try:
            ended = self._collector.collect(step, sampled)
        except CachePoisoned as error:
            self._recover(error)
            return
        self._finisher.end_all(ended)

    def _sample(self) -> None:
        """Computes the masks that are due, and samples the step in flight that waits for them.

        So no step is left unsampled when `step` returns: new weights, for example, take effect between whole steps.
        """
        update_masks(list(self.scheduler.running), self._finisher)
        if not self._pipeline.may_sample:
            return
        try:
            self._pipeline.sample()
        except CachePoisoned as error:
            self._recover(error)
        except STEP_FAILURES as error:
            if is_fatal(error):
                self._recover(error)
            _LOG.warning("a step could not be sampled; its requests are computed again: %r", error)
            self._requeue()

    def refresh(self) -> None:
        """Recovers if another user of the cache lost or replaced it; `step` calls this first.

        Raises:
            CachePoisoned, JaxRuntimeError: the cache was lost too often, or the device is broken.
        """
        owner = self.runner.owner
        if owner.poisoned:
            refuse_broken(owner.cause)
            self._recover(CachePoisoned("the cache was lost by another user of it"))
        elif self._recovery.has_new_cache:
            self._start_over()

    def _recover(self, error: Exception) -> None:
        """Replaces a lost cache and requeues all requests, which are computed again from their tokens on the host.

        Raises `error` if the device is broken or too many caches were lost.
        """
        if self.speculation is not None:
            self.speculation.cache_lost()
        self._recovery.replace(error)
        self._start_over()

    def _start_over(self) -> None:
        """Requeues all requests and clears the prefix index, since the cache is new and empty."""
        self._requeue()
        self.prefix_reuse.lose_device()
        self._recovery.notice()

    def _requeue(self) -> None:
        """Drops the steps in flight and requeues all running requests.

        It finishes those whose last token was accepted before an interrupt.
        """
        self._pipeline.clear()
        self.prefix_reuse.forget_unconfirmed()
        for sequence in list(self.scheduler.running):
            try:
                sequence.reason = sequence.reason or sequence.stop_reason()
            except STEP_FAILURES as error:
                self._finisher.fail(sequence, error)
                continue
            if sequence.reason is not None:
                self._finisher.finish(sequence, sequence.reason)
        self.scheduler.requeue_all()


def _next_version(last: WeightVersion, wanted: WeightVersion | None) -> WeightVersion:
    """Returns the version of new parameters; raises `ValueError` if it is no int or str, or has no default."""
    if wanted is None and isinstance(last, int):
        return last + 1
    if isinstance(wanted, bool) or not isinstance(wanted, int | str):
        raise ValueError(
            f"version must be an int or a str, got {wanted!r}; the last one was {last!r}"
        )
    return wanted

"""`BatchLoop`: runs requests of the engine's scheduler as forwards of a Transformers model, one step ahead of the host.

The scheduler, the collection of results and the end of requests are the engine's own; this file has what differs: a
step is a replayed decode forward, a packed prefill forward, or both, and one sampling program.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from jaxkv.engine.collect import Collector
from jaxkv.engine.finish import Finisher
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import FINISHED, RequestState, new_request_state
from jaxkv.engine.scheduler import Scheduler
from jaxkv.engine.steps.in_flight import InFlightStep
from jaxkv.engine.steps.step_plan import Part, StepPlan
from jaxkv.text.tokenizer import Tokenizer
from torch_bridge.batching.row_cache import RowCache
from torch_bridge.batching.sampler import Sampler, uploaded
from torch_bridge.transformers_cache.store import Store


class ModelChanged(Exception):
    """The model has changed since the kept pages that requests began from were computed."""


class BatchLoop:
    """One continuous batch over a pool.

    Args:
        store: the pool, whose allocator and prefix index the scheduler uses.
        rows: runs the model.
        sampler: samples the tokens.
        max_rows: most requests that run at once.
        token_budget: most new tokens of a step.
    """

    def __init__(
        self, store: Store, rows: RowCache, sampler: Sampler, *, max_rows: int, token_budget: int
    ) -> None:
        sizes = {group.page_size for group in store.layout.paged_groups}
        allocator, index = store.allocator, store.index
        self._store, self._rows, self._sampler = store, rows, sampler
        self._whole = bool(store.layout.state_groups)
        self._scheduler = Scheduler(
            allocator,
            index,
            page_size=min(sizes, default=_ANY_PAGE),
            max_rows=max_rows,
            token_budget=token_budget,
            whole_prompts=self._whole,
            # Packed kernels skip padding, so any number of tokens is as good.
            fill=lambda least, most: most,
        )
        self._finisher = Finisher(self._scheduler, index, time.monotonic)
        self._collector = Collector(allocator, index, sizes, time.monotonic)
        self._in_flight: deque[InFlightStep] = deque()

    def run(
        self,
        prompts: Sequence[Sequence[Request]],
        tokenizer: Tokenizer | None,
        has_changed: Callable[[], bool] | None = None,
    ) -> list[list[RequestState]]:
        """Runs requests until all have ended, and returns their states. On an exception, it ends them all.

        Args:
            prompts: the samples of each prompt.
            tokenizer: finds stop strings.
            has_changed: returns whether the model has changed, of which the prefix index knows nothing yet. It is
                called when the first step was sent, since it waits for the device.

        Raises:
            ModelChanged: the model has changed. No token was read.
            OutOfPages: no request runs, and the first one cannot get its pages because other users of the pool, such as
                rows of the cache or its forks, hold them.
        """
        states = [[self._state(request, tokenizer) for request in samples] for samples in prompts]
        flat = [state for samples in states for state in samples]
        try:
            for first, *others in states:
                for other in others:
                    self._scheduler.add_sample(first, other)
                self._scheduler.add(first)
            with self._rows.serving():
                self._step(has_changed)
                while any(state.status != FINISHED for state in flat):
                    self._step()
        finally:
            self._in_flight.clear()
            for state in flat:
                if state.status != FINISHED:
                    self._finisher.finish(state, "abort")
            self._store.index.forget_unconfirmed()
        return states

    def _state(self, request: Request, tokenizer: Tokenizer | None) -> RequestState:
        return new_request_state(
            request,
            number=self._store.new_number(),
            tokenizer=tokenizer,
            streamed=False,
            now=time.monotonic(),
        )

    def _step(self, has_changed: Callable[[], bool] | None = None) -> None:
        """Sends the next step, then reads the tokens of the one before."""
        plan = self._scheduler.plan()
        if plan.copies:
            self._copy(plan)
        if plan.parts:
            self._in_flight.append(self._send(plan.parts))
        if has_changed is not None and has_changed():
            raise ModelChanged
        ahead = 1 if plan.parts else 0
        progressed = bool(plan.parts or plan.preempted or self._in_flight)
        while len(self._in_flight) > ahead:
            step = self._in_flight.popleft()
            sampled = step.unpack(self._sampler.read(step))
            self._finisher.end_all(self._collector.collect(step, sampled))
        if not progressed and self._scheduler.shortage is not None:
            raise self._scheduler.shortage

    def _copy(self, plan: StepPlan) -> None:
        """Copies the shared pages that the step writes."""
        lease = self._store.borrow()
        try:
            self._store.copy(lease, [copy for _, copy in plan.copies])
        finally:
            self._store.give_back(lease)

    def _send(self, planned: Sequence[Part]) -> InFlightStep:
        """Queues a step: the decode rows in one forward, the prompts packed in another, and the sampling of both."""
        decode = [part for part in planned if part.count == 1]
        chunks = [part for part in planned if part.count > 1]
        parts = [*decode, *chunks]
        assert len(parts) == len(planned), "without kept outputs, a row has a token to compute"
        now = time.monotonic()
        for part in parts:
            if part.sequence.admitted is None:
                part.sequence.admitted = now
        self._sampler.admit([part.sequence for part in parts])
        logits = [self._decode(decode)] if decode else []
        if self._whole:
            # Recurrent layers compute one row's tokens from its first one on.
            logits += [self._prompt(part) for part in chunks]
        elif chunks:
            logits.append(self._prefill(chunks))
        step = self._sampler.sample(parts, logits)
        self._scheduler.dispatched(parts)
        return step

    def _decode(self, parts: Sequence[Part]) -> torch.Tensor:
        ids = self._sampler.last_tokens(parts)
        starts = np.array([[part.start] for part in parts], np.int64)
        return self._rows.decode(_ends(parts), ids, uploaded(starts, self._store.device))

    def _prompt(self, part: Part) -> torch.Tensor:
        [row], both = _ends([part]), self._new_tokens([part])
        return self._rows.prompt(row, both[:1], both[1:])

    def _prefill(self, parts: Sequence[Part]) -> torch.Tensor:
        both = self._new_tokens(parts)
        counts = [part.count for part in parts]
        last = uploaded(np.cumsum(counts) - 1, self._store.device)
        return self._rows.prefill(_ends(parts), counts, both[:1], both[1:], last)

    def _new_tokens(self, parts: Sequence[Part]) -> torch.Tensor:
        """Returns ids and positions of the new tokens, row after row, int64 [2, tokens]."""
        ids = [part.sequence.tokens[part.start : part.start + part.count] for part in parts]
        positions = [np.arange(part.start, part.start + part.count) for part in parts]
        both = np.stack([np.concatenate(ids), np.concatenate(positions)])
        return uploaded(both, self._store.device)


_ANY_PAGE = 64
"""Tokens by which reservations grow in a pool without pages."""


def _ends(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Returns number and tokens, the new ones included, of each row."""
    return [(part.sequence.number, part.start + part.count) for part in parts]

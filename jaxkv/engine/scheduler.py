"""The scheduler: which requests take part in the next step, with how many tokens, and which are preempted.

Waiting and running requests are ordered by (priority, arrival), and admitted in this order. The first running request
is never preempted, so it always makes progress. When it ends, the next one is the first, so every request ends.
"""

from collections.abc import Callable, Sequence

from jaxkv.cache.page_allocator import PageAllocator, PageCopy, Reservation
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.host_tier.host_prefetch import HostPrefetch
from jaxkv.engine.parallel_samples import ParallelSamples
from jaxkv.engine.request_queues import RequestQueues
from jaxkv.engine.request_state import FINISHED, RUNNING, RequestState
from jaxkv.engine.speculation.speculation import Speculation
from jaxkv.engine.steps.step_plan import (
    Part,
    StepPlan,
    align,
    drafted,
    extended,
    next_decode_part,
    part_of,
    trim,
)
from jaxkv.errors import OutOfPages, OutOfStates


class Scheduler:
    """Continuous batching under a token budget.

    A running request takes part in a step with one decode token, with a prefill chunk, or with no token if only
    sampling is left. Decode tokens come first, and prefill chunks share the rest of the budget. If no padded size holds
    both without much padding, one step has the prefill chunks alone and the next one the decode tokens alone.

    Args:
        allocator: allocates the pages.
        prefix: the prefix index; `None` if the prefix cache is off.
        page_size: granularity of page reservations in tokens; the smallest page size of any group.
        max_rows: most sequences of a step.
        token_budget: most tokens of a step; a whole prompt may exceed it.
        whole_prompts: prompts are computed in one step and share no prefix.
        fill: given the least and the most tokens of a step, returns a number between them that needs little padding, or
            `None` if there is none.
        chunk_size: prefill chunks end at its multiples: the chunk size of recurrent layers.
        most_steps: decode steps that are planned at once while all requests generate and pages are free.
        most_rows_at_once: most requests of such a plan; `None` for any number.
        prefetch: swaps prefixes in from the host; `None` without a host tier.
        speculation: drafts tokens that decode steps verify; `None` for none.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        prefix: PrefixIndex | None,
        *,
        page_size: int,
        max_rows: int,
        token_budget: int,
        whole_prompts: bool,
        fill: Callable[[int, int], int | None],
        chunk_size: int = 1,
        most_steps: int = 1,
        most_rows_at_once: int | None = None,
        prefetch: HostPrefetch | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        if token_budget < max_rows:
            raise ValueError(
                f"token_budget must be at least the {max_rows} rows of a step, got {token_budget}; "
                f"raise token_budget or lower max_sequences"
            )
        self.most_steps = most_steps
        self.most_rows_at_once = max_rows if most_rows_at_once is None else most_rows_at_once
        self.shortage: OutOfPages | OutOfStates | None = None
        """The error of a reservation that failed in the last plan; `None` if none did."""
        self._queues = RequestQueues()
        self._prefetch = prefetch
        self._speculation = speculation
        self._allocator = allocator
        self._parallel_samples = ParallelSamples(allocator, self._queues)
        self._prefix = None if whole_prompts else prefix
        self._page_size = page_size
        self._max_rows = max_rows
        self._budget = token_budget
        self._whole = whole_prompts
        # Most new tokens for which a request reserves pages of window groups at a time; `None` for no limit. Pages of
        # groups without a window are reserved for the whole prompt at once.
        ahead = None if whole_prompts else allocator.most_ahead
        self._stride = None if ahead is None or ahead < 1 else min(token_budget, ahead)
        self._fill = fill
        self._chunk_size = chunk_size
        # Requests of the next steps, one list per step, planned before the regular steps.
        self._next_steps: list[list[RequestState]] = []
        # Set by a step that left out the decode rows: the next step has no others.
        self._decode_next = False
        self._reset_plan()

    @property
    def waiting(self) -> Sequence[RequestState]:
        """Queued requests, in order. Samples that wait for another sample are not among them."""
        return self._queues.waiting

    @property
    def running(self) -> Sequence[RequestState]:
        """Requests that hold pages, in order."""
        return self._queues.running

    def add(self, sequence: RequestState) -> None:
        """Queues a request."""
        self._queues.wait(sequence)

    def add_sample(self, first: RequestState, other: RequestState) -> None:
        """Adds another sample of the same prompt; it waits until the first sample has computed the prompt.

        With `whole_prompts` it is queued like any other request, and computes the prompt itself.
        """
        if self._whole:
            self.add(other)
        else:
            first.other_samples.append(other)
            other.first_sample = first

    def end(self, sequence: RequestState) -> None:
        """Removes a request in any state and releases its pages. A second call does nothing."""
        if sequence.status == FINISHED and sequence not in self.running:
            return
        self._allocator.release_if_open(sequence.number)
        if self._prefetch is not None:
            self._prefetch.cancel(sequence)
        self._parallel_samples.detach(sequence)
        first = sequence.first_sample
        if first is not None and sequence in first.other_samples:
            first.other_samples.remove(sequence)
        sequence.first_sample = None
        sequence.epoch += 1
        self._queues.end(sequence)

    def isolate(self, sequences: list[RequestState]) -> None:
        """Lets each of the next steps run one of these requests alone, to find the request whose step fails."""
        self._next_steps = [[sequence] for sequence in sequences]

    def plan_next(self, sequences: list[RequestState]) -> None:
        """Lets the next step run these requests, which were left out of a step that had to be made smaller."""
        self._next_steps.insert(0, sequences)

    def requeue(self, sequence: RequestState) -> None:
        """Preempts a running request: it loses its pages and waits again."""
        self._preempt(sequence)

    def requeue_all(self) -> None:
        """Preempts all running requests."""
        while self.running:
            self._preempt(self.running[-1])
        self._next_steps = []

    def plan(self) -> StepPlan:
        """Plans the next step, or the next few decode steps, and reserves the pages that they write."""
        self._reset_plan()
        forced = bool(self._next_steps)
        if self._next_steps:
            # Some may have ended or been preempted since they were listed.
            listed = self._next_steps.pop(0)
            rows, chunks = self._reserve_running([one for one in listed if one.status == RUNNING])
        else:
            rows, chunks = self._plan_all()
        rows, wanted = self._divide_budget(rows, chunks)
        wanted += [(sequence, 0) for sequence in self._sample_only]
        parts = rows + [part_of(sequence, count) for sequence, count in wanted]
        steps = 1
        has_drafts = self._speculation is not None and not forced and self._draft(parts)
        is_few = len(parts) <= self.most_rows_at_once
        may_burst = self.most_steps > 1 and is_few and not (has_drafts or forced or self.waiting)
        if may_burst and self._reserve_steps(parts):
            steps = self.most_steps
            parts = [extended(part, steps) for part in parts]
        return StepPlan(
            steps=steps,
            parts=tuple(parts),
            new_entries=tuple(self._new_entries),
            copies=tuple(self._copies),
            preempted=tuple(self._preempted),
        )

    def dispatched(self, parts: Sequence[Part], *, drafts_next: bool = False) -> None:
        """Records that a step of these parts was dispatched; their tokens count as computed from now on.

        Args:
            parts: the parts of the step; drafts count as if all were accepted, until they are taken back.
            drafts_next: the step ends with drafts of the next tokens, on the device.
        """
        ends: list[tuple[int, int]] = []
        for sequence, start, count, emits, _, _ in parts:
            sequence.pending += emits
            ends.append((sequence.number, start + count))
        self._allocator.commit_all(ends)
        if self._speculation is not None:
            for part in parts:
                part.sequence.unread_drafts += len(part.drafts)
                part.sequence.drafts_on_device = drafts_next

    @property
    def only_decodes(self) -> bool:
        """Whether the next plan has decode parts of running requests alone, in any order."""
        is_full = len(self.running) >= self._max_rows
        return not self._next_steps and (is_full or not self.waiting)

    def _draft(self, parts: list[Part]) -> bool:
        """Adds drafts to the decode parts of a step without prompts, as far as pages are free; returns whether any."""
        assert self._speculation is not None
        for index, part in enumerate(self._speculation.draft(parts)):
            sequence, start, drafts = part.sequence, part.start, part.drafts
            if drafts and not self._reserve_ahead(sequence, start + 1 + len(drafts)):
                part = drafted(part, drafts[: max(0, sequence.writable - start - 1)])
            if part.drafts:
                parts[index] = part
        return any(part.drafts or part.sequence.unread_drafts for part in parts)

    def _reserve_steps(self, parts: list[Part]) -> bool:
        """Reserves pages for several decode steps; returns False if a part is no decode step or pages run out."""
        if any(part.count != 1 or not part.emits for part in parts):
            return False
        return all(
            self._reserve_ahead(part.sequence, part.start + extended(part, self.most_steps).count)
            for part in parts
        )

    def _reserve_ahead(self, sequence: RequestState, needed: int) -> bool:
        """Reserves whole pages for a request's first `needed` tokens if enough are free; preempts no request."""
        if needed <= sequence.writable:
            return True
        rounded = min(-(-needed // self._page_size) * self._page_size, sequence.longest - 1)
        if self._stride is not None:
            rounded = min(rounded, sequence.computed + self._stride)
        if rounded < needed:
            return False
        try:
            reservation = self._allocator.reserve(sequence.number, rounded)
        except (OutOfPages, OutOfStates):
            return False
        self._record(sequence, reservation)
        return True

    def _reset_plan(self) -> None:
        """Empties what `plan` collects."""
        self._new_entries: list[tuple[RequestState, int]] = []
        self._copies: list[tuple[RequestState, PageCopy]] = []
        self._preempted: list[RequestState] = []
        self._sample_only: list[RequestState] = []
        self.shortage = None

    def _plan_all(self) -> tuple[list[Part], list[RequestState]]:
        """Starts other samples and admits waiting requests; returns rows and chunks as `_reserve_running` does."""
        self._parallel_samples.start(self._max_rows)
        rows, chunks = self._reserve_running(list(self._queues.running))
        decode_only, self._decode_next = self._decode_next and bool(rows), False
        if decode_only:
            return rows, []
        if not self._preempted:
            self._admit_waiting(len(rows), chunks)
        return rows, chunks

    def _reserve_running(
        self, candidates: list[RequestState]
    ) -> tuple[list[Part], list[RequestState]]:
        """Reserves pages for running requests; returns parts of one token, and the requests with more to compute.

        Requests whose tokens are all computed are added to `_sample_only`.
        """
        rows: list[Part] = []
        chunks: list[RequestState] = []
        for sequence in candidates:
            # Most steps find pages reserved: reservations are rounded up to whole pages.
            part = next_decode_part(sequence)
            if part is not None:
                rows.append(part)
                continue
            remaining = sequence.remaining if sequence.status == RUNNING else 0
            if remaining == 0:
                if sequence.status == RUNNING and sequence.is_computed:
                    self._sample_only.append(sequence)
                continue
            wanted = remaining if self._stride is None else min(remaining, self._stride)
            if sequence.computed + wanted <= sequence.writable or self._make_room(sequence):
                if remaining == 1:
                    rows.append(part_of(sequence, 1))
                else:
                    chunks.append(sequence)
        return rows, chunks

    def _divide_budget(
        self, rows: list[Part], chunks: list[RequestState]
    ) -> tuple[list[Part], list[tuple[RequestState, int]]]:
        """Divides the token budget: one token per decode row, then prefill chunks in order, cut to fill a bucket.

        Returns:
            The decode rows of this step: all or none. The tokens of each prefill chunk.
        """
        left = self._budget - len(rows)
        wanted: list[tuple[RequestState, int]] = []
        # A whole prompt that does not fit beside the decode rows gets this step; the next one decodes.
        if self._whole and chunks and self._chunk_tokens(chunks[0]) > left:
            self._decode_next, rows = bool(rows), []
            left = max(self._budget, self._chunk_tokens(chunks[0]))
        for sequence in chunks:
            count = self._chunk_tokens(sequence)
            if count > left:
                count = 0 if self._whole else left
            if count:
                wanted.append((sequence, count))
            left -= count
        total = sum([count for _, count in wanted])
        if wanted and not self._whole and any(count > 1 for _, count in wanted):
            fits = self._fill(len(rows) + 1, len(rows) + total)
            if fits is None:
                # No bucket holds both without much padding: this step prefills, the next one decodes.
                self._decode_next, rows = True, []
                fits = self._fill(1, total)
                assert fits is not None, "one or more tokens always fit a bucket"
            before = list(wanted)
            trim(wanted, len(rows) + total - fits)
            align(wanted, before, self._chunk_size)
        return rows, wanted

    def _chunk_tokens(self, sequence: RequestState) -> int:
        """Returns how many tokens a request could take in this step.

        With `whole_prompts` it takes the prompt in one step, then generated tokens one by one, also after a preemption.
        """
        if self._whole:
            return 1 if sequence.computed else len(sequence.request.prompt)
        return min(sequence.remaining, sequence.writable - sequence.computed)

    def _admit_waiting(self, rows: int, chunks: list[RequestState]) -> None:
        """Admits waiting requests in order while rows, tokens and pages are left."""
        left = self._budget - rows - sum(self._chunk_tokens(sequence) for sequence in chunks)
        while self.waiting and len(self.running) < self._max_rows and left > 0:
            sequence = self.waiting[0]
            if not self._admit(sequence, left):
                return
            if sequence.is_computed:
                self._sample_only.append(sequence)
            if sequence.remaining:
                chunks.append(sequence)
                left -= self._chunk_tokens(sequence)

    def _admit(self, sequence: RequestState, left: int) -> bool:
        """Admits a request if it gets its pages; the step has room for `left` of its tokens."""
        try:
            if not self._take_pages(sequence, left):
                return False
            self._queues.run(sequence)
        except BaseException:
            # After an interrupt, for example, the next try must not find the sequence open.
            self._undo_admission(sequence)
            raise
        return True

    def _undo_admission(self, sequence: RequestState) -> None:
        """Releases the pages of a request and queues it again; correct at any point of an admission."""
        self._allocator.release_if_open(sequence.number)
        sequence.restart()
        self._queues.wait(sequence)

    def _take_pages(self, sequence: RequestState, left: int) -> bool:
        """Opens a sequence, adopts its cached prefix and reserves pages for its known tokens.

        In window groups it reserves pages for the next step only. It returns False and holds nothing if pages run out,
        or if the request should wait for its prefix.
        """
        number, found = sequence.number, 0
        if self._prefix is None:
            self._allocator.open(number)
        else:
            sequence.keys = sequence.keys or self._prefix.keys(sequence.request.salt)
            if self._prefix.awaits(sequence.tokens, sequence.keys):
                return False
            most = sequence.prompt_tokens - 1 if sequence.other_samples else None
            if self._prefetch is not None and self._prefetch.start_swap_in(sequence, most):
                return False
            adopted = self._prefix.adopt(number, sequence.tokens, sequence.keys, most=most)
            found = adopted.num_tokens
        sequence.start(self._allocator.held(number))
        if not self._reserve(sequence, max(found, sequence.goal), left):
            self._allocator.release(number)
            sequence.pages, sequence.collected = None, 0
            return False
        if sequence.cached is None:
            sequence.cached = found
        return True

    def _make_room(self, sequence: RequestState) -> bool:
        """Reserves pages for all known tokens of a running request; preempts the last running requests for them."""
        # Whole pages, so that most steps reserve nothing.
        size = self._page_size
        # The last generated token is never written. Other samples fork from computed tokens only.
        rounded = min(-(-sequence.goal // size) * size, sequence.longest - 1)
        wanted = sequence.goal if sequence.other_samples else rounded
        while not self._reserve(sequence, wanted):
            # Once its prefill chunk in flight is read, its own pages out of the window are freed.
            if self._stride is not None and sequence.computed > sequence.collected + 1:
                return False
            last = self.running[-1]
            if last is self.running[0]:
                return False
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _reserve(self, sequence: RequestState, num_tokens: int, left: int | None = None) -> bool:
        """Reserves pages for `num_tokens` tokens or returns False; window groups reserve at most `left` new tokens."""
        near = num_tokens
        if self._stride is not None:
            near = min(num_tokens, sequence.computed + min(self._stride, left or self._stride))
        try:
            reservation = self._allocator.reserve(sequence.number, near, whole=num_tokens)
        except (OutOfPages, OutOfStates) as error:
            if self._prefetch is not None and self._prefetch.cancel_all():
                return self._reserve(sequence, num_tokens, left)
            self.shortage = error
            return False
        self._record(sequence, reservation)
        return True

    def _record(self, sequence: RequestState, reservation: Reservation) -> None:
        """Adds to the plan the copies of a reservation, and its new sampling entry unless a copy fills it."""
        self._copies += [(sequence, copy) for copy in reservation.copies]
        entry = reservation.new_states.get("sampling")
        if entry is not None and all(copy.group != "sampling" for copy in reservation.copies):
            self._new_entries.append((sequence, entry))

    def _preempt(self, sequence: RequestState) -> None:
        self._new_entries = [one for one in self._new_entries if one[0] is not sequence]
        self._copies = [one for one in self._copies if one[0] is not sequence]
        self._sample_only = [one for one in self._sample_only if one is not sequence]
        self._preempted.append(sequence)
        sequence.preemptions += 1
        self._undo_admission(sequence)

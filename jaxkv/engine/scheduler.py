"""Who runs in the next step, with how many tokens, and who has to give way. Touches no arrays and no hashes.

Waiting and running sequences are ordered by (priority, arrival). Whoever comes first is never made to give way, so
it always gets on; and nobody is admitted past another who waits, so everybody becomes the first.
"""

from collections.abc import Callable, Iterable, Sequence

from jaxkv.cache.page_allocator import PageAllocator, PageCopy, Reservation
from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.engine.host_prefetch import HostPrefetch
from jaxkv.engine.parallel_samples import ParallelSamples
from jaxkv.engine.request_queues import RequestQueues
from jaxkv.engine.request_state import FINISHED, RUNNING, RequestState
from jaxkv.engine.step_plan import Part, StepPlan, align, part_of, several, trim
from jaxkv.errors import OutOfPages, OutOfStates


class Scheduler:
    """Continuous batching under a token budget.

    Every sequence that runs takes part in a step with one token, or with as many of its prompt as the budget leaves.

    Args:
        allocator: holds the pages.
        prefix: pages of earlier prompts, if they are kept.
        page_size: tokens that pages are taken for at a time; the smallest page of any group.
        max_rows: most sequences of a step.
        token_budget: most tokens of a step; whole prompts may exceed it.
        whole_prompts: prompts are not cut: the budget does not split them and no part of them is shared.
        fill: given a least and a most, returns how many tokens a step should have so as not to be padded
            much, or `None` if no number will do.
        chunk_size: tokens at whose multiples prompts are cut, since recurrent layers scan them so.
        most_steps: decode steps that are planned at once, where every request generates and pages are free.
        prefetch: brings prefixes back from the host; `None` if none go there.
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
        prefetch: HostPrefetch | None = None,
    ) -> None:
        if token_budget < max_rows:
            raise ValueError(
                f"a step of {max_rows} sequences needs a budget of as many tokens, got {token_budget}"
            )
        self.most_steps = most_steps
        self.shortage: OutOfPages | OutOfStates | None = None
        """Why the last plan left somebody out, if it did."""
        self._queues = RequestQueues()
        self._prefetch = prefetch
        self._allocator = allocator
        self._parallel_samples = ParallelSamples(allocator, self._queues)
        self._prefix = None if whole_prompts else prefix
        self._page_size = page_size
        self._max_rows = max_rows
        self._budget = token_budget
        self._whole = whole_prompts
        # Where layers have windows, a prompt takes their pages from step to step and not all at once.
        ahead = None if whole_prompts else allocator.most_ahead
        self._stride = None if ahead is None or ahead < 1 else min(token_budget, ahead)
        self._fill = fill
        self._chunk_size = chunk_size
        self._alone: list[list[RequestState]] = []
        self._owes_decode = False
        self._reset_plan()

    @property
    def waiting(self) -> Sequence[RequestState]:
        """Requests that hold no pages, first come first."""
        return self._queues.waiting

    @property
    def running(self) -> Sequence[RequestState]:
        """Requests that hold pages, first come first."""
        return self._queues.running

    def add(self, sequence: RequestState) -> None:
        """Queues a request; the other samples of its prompt wait for it."""
        self._queues.wait(sequence)

    def add_sample(self, first: RequestState, other: RequestState) -> None:
        """Lets another sample of the same prompt wait until the first has computed it."""
        if self._whole:
            self.add(other)
        else:
            first.other_samples.append(other)
            other.first_sample = first

    def drop(self, sequence: RequestState) -> None:
        """Ends a sequence, in whatever state it is, and gives its pages back. Twice is once."""
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
        """Makes each of these run in a step of its own next, to find the one whose step fails."""
        self._alone = [[sequence] for sequence in sequences]

    def postpone(self, sequences: list[RequestState]) -> None:
        """Gives the next step to these, whom a step that was planned had to leave out."""
        self._alone.insert(0, sequences)

    def put_off(self, sequence: RequestState) -> None:
        """Makes a running one wait again: what it had computed is given up."""
        self._preempt(sequence)

    def requeue_all(self) -> None:
        """Makes all running sequences wait again: what they had computed is lost."""
        while self.running:
            self._preempt(self.running[-1])
        self._alone = []

    def plan(self) -> StepPlan:
        """Decides the next step, or the next few, and takes the pages they write."""
        self._reset_plan()
        alone = bool(self._alone)
        if self._alone:
            rows, chunks = self._ready(self._alone.pop(0))
        else:
            rows, chunks = self._plan_many()
        counts = self._counts(rows, chunks) + [(sequence, 0) for sequence in self._known]
        parts = [part_of(sequence, count) for sequence, count in counts]
        steps = 1
        if self.most_steps > 1 and not (alone or self.waiting) and self._stretch(parts):
            steps = self.most_steps
            parts = [several(part, steps) for part in parts]
        return StepPlan(
            steps=steps,
            parts=tuple(parts),
            fresh=tuple(self._fresh),
            copies=tuple(self._copies),
            preempted=tuple(self._preempted),
        )

    def dispatched(self, parts: Iterable[Part]) -> None:
        """Records that a step of these is under way."""
        ends: list[tuple[int, int]] = []
        for sequence, start, count, emits, _ in parts:
            sequence.pending += emits
            ends.append((sequence.number, start + count))
        self._allocator.commit_all(ends)

    def _stretch(self, parts: list[Part]) -> bool:
        """Takes the pages that several steps of these write; returns whether all generate and there were enough."""
        if any(part.count != 1 or not part.emits for part in parts):
            return False
        for part in parts:
            sequence, needed = part.sequence, part.start + several(part, self.most_steps).count
            if needed <= sequence.writable:
                continue
            rounded = min(-(-needed // self._page_size) * self._page_size, sequence.longest - 1)
            if self._stride is not None:
                rounded = min(rounded, sequence.computed + self._stride)
            if rounded < needed or not self._extend(sequence, rounded):
                return False
        return True

    def _extend(self, sequence: RequestState, num_tokens: int) -> bool:
        """Takes pages for so many tokens if they are to be had; nobody gives way for it."""
        try:
            reservation = self._allocator.reserve(sequence.number, num_tokens)
        except (OutOfPages, OutOfStates):
            return False
        self._note(sequence, reservation)
        return True

    def _reset_plan(self) -> None:
        self._fresh: list[tuple[RequestState, int]] = []
        self._copies: list[tuple[RequestState, PageCopy]] = []
        self._preempted: list[RequestState] = []
        self._known: list[RequestState] = []
        self.shortage = None

    def _plan_many(self) -> tuple[list[RequestState], list[RequestState]]:
        self._parallel_samples.start(self._max_rows)
        rows, chunks = self._ready(list(self.running))
        owed, self._owes_decode = self._owes_decode and bool(rows), False
        if owed:
            return rows, []
        if not self._preempted:
            self._admit_waiting(len(rows), chunks)
        return rows, chunks

    def _ready(
        self, candidates: list[RequestState]
    ) -> tuple[list[RequestState], list[RequestState]]:
        """Returns who has one token to compute, with the room for it, and who has more."""
        rows, chunks = [], []
        for sequence in candidates:
            remaining = sequence.remaining if sequence.status == RUNNING else 0
            if remaining == 0:
                if sequence.status == RUNNING and sequence.is_known:
                    self._known.append(sequence)
                continue
            # Nearly always there is room: pages are taken many tokens at a time.
            wanted = remaining if self._stride is None else min(remaining, self._stride)
            if sequence.computed + wanted <= sequence.writable or self._make_room(sequence):
                (rows if remaining == 1 else chunks).append(sequence)
        return rows, chunks

    def _counts(
        self, rows: list[RequestState], chunks: list[RequestState]
    ) -> list[tuple[RequestState, int]]:
        """Shares the budget out: one token for each row, then prompts in order, cut to fill a bucket."""
        left, wanted = self._budget - len(rows), []
        if self._whole and chunks and self._chunk(chunks[0]) > left:
            self._owes_decode, rows = bool(rows), []
            left = max(self._budget, self._chunk(chunks[0]))
        for sequence in chunks:
            count = self._chunk(sequence)
            if count > left:
                count = 0 if self._whole else left
            if count:
                wanted.append((sequence, count))
            left -= count
        total = sum(count for _, count in wanted)
        if not self._whole and any(count > 1 for _, count in wanted):
            fits = self._fill(len(rows) + 1, len(rows) + total)
            if fits is None:
                # The rows would leave the prompts a bucket that is mostly padding: each gets a step of its own.
                self._owes_decode, rows = True, []
                fits = self._fill(1, total)
                assert fits is not None, "a few tokens always fit"
            before = list(wanted)
            trim(wanted, len(rows) + total - fits)
            align(wanted, before, self._chunk_size)
        return [(sequence, 1) for sequence in rows] + wanted

    def _chunk(self, sequence: RequestState) -> int:
        """Returns how many tokens the sequence could take. A whole prompt comes back token by token after itself."""
        if self._whole:
            return 1 if sequence.computed else len(sequence.request.prompt)
        return min(sequence.remaining, sequence.writable - sequence.computed)

    def _admit_waiting(self, rows: int, chunks: list[RequestState]) -> None:
        """Takes sequences in, in order, as long as there are rows, tokens and pages for them."""
        left = self._budget - rows - sum(self._chunk(sequence) for sequence in chunks)
        while self.waiting and len(self.running) < self._max_rows and left > 0:
            sequence = self.waiting[0]
            if not self._admit(sequence, left):
                return
            if sequence.is_known:
                self._known.append(sequence)
            if sequence.remaining:
                chunks.append(sequence)
                left -= self._chunk(sequence)

    def _admit(self, sequence: RequestState, left: int) -> bool:
        """Takes a sequence in, or leaves it where it was; the step has room for `left` of its tokens."""
        try:
            if not self._take_pages(sequence, left):
                return False
            self._queues.run(sequence)
        except BaseException:
            # An interrupt, say: the next try must not find the sequence open.
            self._put_back(sequence)
            raise
        return True

    def _put_back(self, sequence: RequestState) -> None:
        """Undoes an admission, wherever it was broken off."""
        self._allocator.release_if_open(sequence.number)
        sequence.restart()
        self._queues.wait(sequence)

    def _take_pages(self, sequence: RequestState, left: int) -> bool:
        """Takes the pages of all tokens that are known, of window groups those for the next step alone; or none."""
        number, found = sequence.number, 0
        if self._prefix is None:
            self._allocator.open(number)
        else:
            sequence.keys = sequence.keys or self._prefix.keys(sequence.request.salt)
            if self._prefix.awaits(sequence.tokens, sequence.keys):
                return False
            most = sequence.prompt_tokens - 1 if sequence.other_samples else None
            if self._prefetch is not None and self._prefetch.holds_back(sequence, most):
                return False
            adopted = self._prefix.adopt(number, sequence.tokens, sequence.keys, most=most)
            found = adopted.num_tokens
        sequence.begin(self._allocator.held(number))
        if not self._reserve(sequence, max(found, sequence.goal), left):
            self._allocator.release(number)
            sequence.pages, sequence.collected = None, 0
            return False
        if sequence.cached is None:
            sequence.cached = found
        return True

    def _make_room(self, sequence: RequestState) -> bool:
        """Takes the pages of all known tokens of a running one; whoever comes last gives way until there are enough."""
        # A page at a time, so that most steps need not ask.
        size = self._page_size
        # The last token that is generated is never written, and other samples fork from no more than is computed.
        rounded = min(-(-sequence.goal // size) * size, sequence.longest - 1)
        wanted = sequence.goal if sequence.other_samples else rounded
        while not self._reserve(sequence, wanted):
            if self._stride is not None and sequence.computed > sequence.collected + 1:
                return False  # Once its chunk under way was read, it gives pages back itself.
            last = self.running[-1]
            if last is self.running[0]:
                return False
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _reserve(self, sequence: RequestState, num_tokens: int, left: int | None = None) -> bool:
        """Takes pages for so many tokens, or none; those of window groups for `left` more tokens than are computed."""
        near = num_tokens
        if self._stride is not None:
            near = min(num_tokens, sequence.computed + min(self._stride, left or self._stride))
        try:
            reservation = self._allocator.reserve(sequence.number, near, whole=num_tokens)
        except (OutOfPages, OutOfStates) as error:
            if self._prefetch is not None and self._prefetch.give_way():
                return self._reserve(sequence, num_tokens, left)
            self.shortage = error
            return False
        self._note(sequence, reservation)
        return True

    def _note(self, sequence: RequestState, reservation: Reservation) -> None:
        self._copies += [(sequence, copy) for copy in reservation.copies]
        entry = reservation.new_states.get("sampling")
        if entry is not None and all(copy.group != "sampling" for copy in reservation.copies):
            self._fresh.append((sequence, entry))

    def _preempt(self, sequence: RequestState) -> None:
        self._fresh = [one for one in self._fresh if one[0] is not sequence]
        self._copies = [one for one in self._copies if one[0] is not sequence]
        self._known = [one for one in self._known if one is not sequence]
        self._preempted.append(sequence)
        sequence.preemptions += 1
        self._put_back(sequence)

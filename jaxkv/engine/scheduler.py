"""Who runs in the next step, with how many tokens, and who has to give way. Touches no arrays and no hashes.

Waiting and running sequences are ordered by (priority, arrival). Whoever comes first is never made to give way, so
it always gets on; and nobody is admitted past another who waits, so everybody becomes the first.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from jaxkv.cache.accounts import Accounts, PageCopy, Reservation
from jaxkv.cache.prefix import PrefixIndex
from jaxkv.engine.sequence import FINISHED, RUNNING, WAITING, Sequence
from jaxkv.engine.step_plan import Part, StepPlan, part_of, trim
from jaxkv.errors import OutOfPages, OutOfStates

_ORDER = attrgetter("order")


class Scheduler:
    """Continuous batching under a token budget.

    Every sequence that runs takes part in a step with one token, or with as many of its prompt as the budget leaves.

    Args:
        accounts: hold the pages.
        prefix: pages of earlier prompts, if they are kept.
        page_size: tokens that pages are taken for at a time; the smallest page of any group.
        max_rows: most sequences of a step.
        token_budget: most tokens of a step; whole prompts may exceed it.
        whole_prompts: prompts are not cut: the budget does not split them and no part of them is shared.
        fill: given a least and a most, returns how many tokens a step should have so as not to be padded
            much, or `None` if no number will do.
    """

    def __init__(
        self,
        accounts: Accounts,
        prefix: PrefixIndex | None,
        *,
        page_size: int,
        max_rows: int,
        token_budget: int,
        whole_prompts: bool,
        fill: Callable[[int, int], int | None],
    ) -> None:
        if token_budget < max_rows:
            raise ValueError(
                f"a step of {max_rows} sequences needs a budget of as many tokens, got {token_budget}"
            )
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.shortage: OutOfPages | OutOfStates | None = None
        """Why the last plan left somebody out, if it did."""
        self._accounts = accounts
        self._prefix = None if whole_prompts else prefix
        self._page_size = page_size
        self._max_rows = max_rows
        self._budget = token_budget
        self._whole = whole_prompts
        self._fill = fill
        self._suspects: list[Sequence] = []
        self._owes_decode = False
        self._reset_plan()

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence wait for its turn; its followers wait for it."""
        insort(self.waiting, sequence, key=_ORDER)

    def follow(self, leader: Sequence, follower: Sequence) -> None:
        """Lets another sample of the same prompt wait until the leader has computed it."""
        if self._whole:
            self.add(follower)
        else:
            leader.followers.append(follower)
            follower.leader = leader

    def drop(self, sequence: Sequence) -> None:
        """Ends a sequence, in whatever state it is, and gives its pages back. Twice is once."""
        if sequence.status == FINISHED:
            return
        if sequence.status == RUNNING:
            self.running.remove(sequence)
            self._accounts.release(sequence.number)
        elif sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = FINISHED
        sequence.epoch += 1
        sequence.leader = None
        self._let_wait(sequence.followers)
        sequence.followers = []

    def isolate(self, sequences: list[Sequence]) -> None:
        """Makes each of these run in a step of its own next, to find the one whose step fails."""
        self._suspects = list(sequences)

    def requeue_all(self) -> None:
        """Makes all running sequences wait again: what they had computed is lost."""
        while self.running:
            self._preempt(self.running[-1])
        self._suspects = []

    def plan(self) -> StepPlan:
        """Decides the next step and takes the pages it writes."""
        self._reset_plan()
        if self._suspects:
            rows, chunks = self._ready([self._suspects.pop(0)])
        else:
            rows, chunks = self._plan_many()
        counts = self._counts(rows, chunks)
        return StepPlan(
            parts=tuple(part_of(sequence, count) for sequence, count in counts),
            fresh=tuple(self._fresh),
            copies=tuple(self._copies),
            preempted=tuple(self._preempted),
        )

    def dispatched(self, parts: Iterable[Part]) -> None:
        """Records that a step of these is under way."""
        for part in parts:
            sequence = part.sequence
            sequence.computed = part.start + part.count
            sequence.pending += part.emits
            self._accounts.commit(sequence.number, sequence.computed)

    def _reset_plan(self) -> None:
        self._fresh: list[tuple[Sequence, int]] = []
        self._copies: list[tuple[Sequence, PageCopy]] = []
        self._preempted: list[Sequence] = []
        self.shortage = None

    def _plan_many(self) -> tuple[list[Sequence], list[Sequence]]:
        self._fork_followers()
        rows, chunks = self._ready(list(self.running))
        owed, self._owes_decode = self._owes_decode and bool(rows), False
        if owed:
            return rows, []
        if not self._preempted:
            self._admit_waiting(len(rows), chunks)
        return rows, chunks

    def _ready(self, candidates: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Returns who has one token to compute, with the room for it, and who has more."""
        rows, chunks = [], []
        for sequence in candidates:
            remaining = sequence.remaining if sequence.status == RUNNING else 0
            if remaining and self._make_room(sequence):
                (rows if remaining == 1 else chunks).append(sequence)
        return rows, chunks

    def _counts(self, rows: list[Sequence], chunks: list[Sequence]) -> list[tuple[Sequence, int]]:
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
            trim(wanted, len(rows) + total - fits)
        return [(sequence, 1) for sequence in rows] + wanted

    def _chunk(self, sequence: Sequence) -> int:
        """Returns how many tokens the sequence could take. A whole prompt comes back token by token after itself."""
        if self._whole:
            return 1 if sequence.computed else len(sequence.request.prompt)
        return sequence.remaining

    def _admit_waiting(self, rows: int, chunks: list[Sequence]) -> None:
        """Takes sequences in, in order, as long as there are rows, tokens and pages for them."""
        left = self._budget - rows - sum(self._chunk(sequence) for sequence in chunks)
        while self.waiting and len(self.running) < self._max_rows and left > 0:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                return
            if sequence.remaining:
                chunks.append(sequence)
                left -= self._chunk(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Takes a sequence in, or leaves it where it was."""
        try:
            if not self._take_pages(sequence):
                return False
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_ORDER)
            sequence.status = RUNNING
        except BaseException:
            # An interrupt, say: the next try must not find the account open.
            self._put_back(sequence)
            raise
        return True

    def _put_back(self, sequence: Sequence) -> None:
        """Undoes an admission, wherever it was broken off."""
        if sequence in self.running:
            self.running.remove(sequence)
        if self._accounts.is_open(sequence.number):
            self._accounts.release(sequence.number)
        sequence.restart()
        sequence.status = WAITING
        if sequence not in self.waiting:
            self.add(sequence)

    def _take_pages(self, sequence: Sequence) -> bool:
        """Takes the pages of all tokens that are known, or none."""
        number, found = sequence.number, 0
        if self._prefix is None:
            self._accounts.open(number)
        else:
            sequence.keys = sequence.keys or self._prefix.keys(sequence.request.salt)
            found = self._prefix.adopt(number, sequence.tokens, sequence.keys).num_tokens
        sequence.computed = sequence.collected = sequence.published = found
        if not self._reserve(sequence, max(found, sequence.goal)):
            self._accounts.release(number)
            sequence.computed = sequence.collected = sequence.published = 0
            return False
        if sequence.cached is None:
            sequence.cached = found
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """Takes the pages of all known tokens of a running one; whoever comes last gives way until there are enough."""
        if sequence.goal <= sequence.reserved:
            return True
        # A page at a time, so that most steps need not ask.
        size = self._page_size
        wanted = min(-(-sequence.goal // size) * size, sequence.most_tokens)
        while not self._reserve(sequence, wanted):
            last = self.running[-1]
            if last is self.running[0]:
                return False
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        try:
            reservation = self._accounts.reserve(sequence.number, num_tokens)
        except (OutOfPages, OutOfStates) as error:
            self.shortage = error
            return False
        sequence.reserved = num_tokens
        self._note(sequence, reservation)
        return True

    def _note(self, sequence: Sequence, reservation: Reservation) -> None:
        self._copies += [(sequence, copy) for copy in reservation.copies]
        entry = reservation.new_states.get("sampling")
        if entry is not None and all(copy.group != "sampling" for copy in reservation.copies):
            self._fresh.append((sequence, entry))

    def _preempt(self, sequence: Sequence) -> None:
        self._accounts.release(sequence.number)
        self.running.remove(sequence)
        self._fresh = [one for one in self._fresh if one[0] is not sequence]
        self._copies = [one for one in self._copies if one[0] is not sequence]
        self._preempted.append(sequence)
        sequence.restart()
        sequence.preemptions += 1
        sequence.status = WAITING
        self.add(sequence)

    def _fork_followers(self) -> None:
        """Starts the other samples of prompts whose last token is all that is left to compute."""
        for leader in [one for one in self.running if one.followers and not one.remaining]:
            followers, leader.followers = leader.followers, []
            room = self._max_rows - len(self.running)
            for follower in followers[:room]:
                self._accounts.fork(leader.number, follower.number)
                follower.computed = follower.collected = follower.reserved = leader.computed
                follower.published, follower.cached = leader.computed, leader.computed
                follower.keys = leader.keys and leader.keys.copy()
                follower.leader, follower.status = None, RUNNING
                insort(self.running, follower, key=_ORDER)
            self._let_wait(followers[room:])

    def _let_wait(self, followers: list[Sequence]) -> None:
        """Makes the first of these the leader of the others."""
        for follower in followers:
            follower.leader = None
        if followers:
            self.add(followers[0])
            for follower in followers[1:]:
                self.follow(followers[0], follower)

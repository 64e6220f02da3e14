"""Random programs for engines over a simulated device, with the books checked after every step."""

from jaxkv.cache import integrity
from jaxkv.engine.request_state import FINISHED
from tests.engine.simulated_engines import engine_of
from tests.engine.simulated_requests import WISHES, Faults, answer, groups_of_requests


class WrongOutput(AssertionError):
    """A request got other tokens, another end or other log-probabilities than the oracle's."""


class WrongProgress(AssertionError):
    """The schedule and the allocator have counted different tokens."""


def check_books(engine):
    """Raises if allocator, index, host tier and schedule contradict themselves or each other."""
    allocator, running = engine.sequence_runner.allocator, engine.scheduler.running
    # Swap-ins have negative numbers.
    swap_ins = {number for number in allocator.open_sequences if number < 0}
    integrity.check_books(allocator, engine.prefix, {one.number for one in running} | swap_ins)
    for sequence in running:
        held = allocator.held(sequence.number)
        if not (
            held.computed == sequence.computed
            and sequence.writable <= held.reserved
            and sequence.collected <= sequence.computed
            and sequence.pending >= 0
            and (sequence.reserved < sequence.longest or sequence.reserved == 0)
        ):
            raise WrongProgress(
                f"sequence {sequence.number}: computed {sequence.computed}, but the allocator has {held.computed}; "
                f"collected {sequence.collected}, writable {sequence.writable} of {held.reserved} reserved"
            )


def assert_all_is_free(engine):
    allocator = engine.sequence_runner.allocator
    for group in engine.runner.layout.groups:
        free = allocator.num_free(group.name) + allocator.num_reclaimable(group.name)
        assert free == engine.runner.owner.counts[group.name] - (group.unit == "state")


class Play:
    """Lets an engine serve random requests, with junk in free pages and states, and compares with the oracle.

    Args:
        draw: decides everything.
        setting: of the engine.
        most: groups of requests.
        wishes: what the requests may ask for.

    Attributes:
        engine, device: of the play.
        sequences: all that were taken in, with the request of each.
    """

    def __init__(self, draw, setting, most, wishes=WISHES):
        self.engine, self.device = engine_of(draw, setting)
        self.sequences = []
        self._draw, self._setting = draw, setting
        self._faults = Faults(self.engine, draw, setting.fault_rate)
        self._aborted = set()
        self._waiting = groups_of_requests(draw, most, wishes)
        self._arrivals, self._aborts = (
            draw.choice((0.03, 0.1, 0.3, 0.9)),
            draw.choice((0, 0, 0.02, 0.1)),
        )

    def run(self):
        """Serves all requests, with faults and at the end without, and compares their tokens with the oracle's."""
        steps = 0
        while self._waiting or any(one.status != FINISHED for one, _ in self.sequences):
            self._arrive()
            if self._draw.random() < 0.7:
                self.device.fill_free()
            if self.engine.has_work:
                self._step()
                steps += 1
                assert steps < 8000, "nothing comes to an end"
        self._faults.end()
        while self.engine.has_work:
            self.engine.step()
        check_books(self.engine)
        assert_all_is_free(self.engine)
        if self.engine.prefix is not None:
            assert all(one.confirmed for one in self.engine.prefix._states.kept)
        for sequence, request in self.sequences:
            self._compare(sequence, answer(request, self._setting.broken_every))

    def _arrive(self):
        draw, engine = self._draw, self.engine
        while self._waiting and (draw.random() < self._arrivals or not engine.has_work):
            group = self._waiting.pop(0)
            try:
                made = engine.add(group, streamed=draw.random() < 0.3)
            except ValueError as error:
                if "needs room" not in str(error):
                    raise
            else:
                self.sequences += zip(made, group, strict=True)
            if draw.random() < 0.5:
                return

    def _step(self):
        try:
            self.engine.step()
        except KeyboardInterrupt as interrupt:
            if "injected" not in str(interrupt):
                raise
        if self.sequences and self._draw.random() < self._aborts:
            sequence, _ = self._draw.choice(self.sequences)
            if sequence.status != FINISHED:
                self._aborted.add(sequence)
                self.engine.abort(sequence)
        check_books(self.engine)

    def _compare(self, sequence, wanted):
        got = tuple(sequence.token_ids)
        aborted = sequence in self._aborted
        if sequence.error is not None and not (aborted or self._setting.fault_rate):
            raise sequence.error
        if sequence.error is not None or aborted:
            _require_equal(got, wanted.token_ids[: sequence.generated])
            return
        _require_equal((got, sequence.reason), (wanted.token_ids, wanted.reason))
        if sequence.request.params.logprobs is not None:
            for told, (token, logprob) in zip(sequence.logprobs, wanted.logprobs, strict=True):
                if not abs(told[token] - logprob) < 1e-6:
                    raise WrongOutput(f"log-probability {told[token]}, expected {logprob}")
        if sequence.pieces is not None:
            ids = [piece.token_id for piece in sequence.pieces if piece.token_id is not None]
            _require_equal(ids, sequence.token_ids)
            ends = sum(piece.finish_reason is not None for piece in sequence.pieces)
            _require_equal(ends, 1)


def _require_equal(got, wanted):
    if got != wanted:
        raise WrongOutput(f"got {got}, expected {wanted}")

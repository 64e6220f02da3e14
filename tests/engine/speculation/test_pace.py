"""Drafts are made while a token takes less time with them than without, and the search for a gain costs little."""

from collections import deque

import pytest

from jaxkv.engine.speculation.pace import PLAIN_STEPS, RATE, Pace


class Serving:
    """Rows whose steps take given times; a step with drafts gives each of them more tokens.

    The host reads a step while the `lag` steps after it run.
    """

    def __init__(self, *, rows=3, plain=1.0, drafted=1.5, tokens=2, lag=0):
        self.now, self.lengths = 0.0, [10] * rows
        self.plain, self.drafted, self.tokens = plain, drafted, tokens
        self.pace = Pace(lambda: self.now)
        self.took = []
        self.unread = deque([0] * lag)

    def step(self):
        drafts = self.pace.next_step(range(len(self.lengths)), sum(self.lengths))
        self.now += self.drafted if drafts else self.plain
        self.unread.append(self.tokens if drafts else 1)
        read = self.unread.popleft()
        self.lengths = [one + read for one in self.lengths]
        self.took.append(drafts)

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self.took[-count:]

    @property
    def speedup(self):
        """Tokens of a sequence, by those that steps without drafts had given it in the same time."""
        return (self.lengths[0] - 10 + sum(self.unread)) * self.plain / self.now


def test_drafts_that_pay_go_on_after_steps_without_them_were_measured():
    serving = Serving(drafted=1.9, tokens=2)
    taken = serving.steps(400)
    first = taken.index(True)
    assert PLAIN_STEPS <= first < PLAIN_STEPS + 4
    assert all(taken[first:])
    # From time to time these are measured again.
    assert 4 * PLAIN_STEPS < serving.steps(3000).count(False) < 8 * PLAIN_STEPS
    assert serving.pace.pauses == 0


def test_drafts_that_paid_once_pause_when_steps_without_them_have_become_faster():
    serving = Serving(plain=2.0, drafted=1.5, tokens=1)
    serving.steps(100)
    serving.plain = 1.0
    serving.steps(700)
    assert serving.pace.is_paused


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize(
    ("drafted", "tokens"), [(1.02, 1), (1.15, 1), (1.9, 1), (2.1, 2), (3.5, 3), (7.0, 1)]
)
def test_drafts_that_do_not_pay_cost_less_than_a_fiftieth(drafted, tokens, lag):
    serving = Serving(drafted=drafted, tokens=tokens, lag=lag)
    taken = serving.steps(150)
    assert any(taken)
    # At first, the step that spends the credit and those that are read after it come to more.
    assert serving.now * (1 - serving.speedup) < 2 + 3 * (drafted - tokens) + 0.01 * len(taken)
    serving.steps(1000)
    assert serving.speedup > 0.98
    serving.steps(8000)
    assert serving.speedup > 1 - 1.5 * RATE
    # The search goes on for ever.
    assert any(serving.steps(2000))
    assert serving.pace.pauses > 2


def test_a_hundred_and_fifty_tokens_lose_two_percent_if_steps_are_as_long_as_overlapping_ones():
    """A step that verifies five drafts takes 1.13 times as long on an H100 if it overlaps with the host."""
    serving = Serving(rows=1, plain=5.4, drafted=6.1, tokens=1, lag=1)
    serving.steps(150)
    assert serving.speedup > 0.98


def test_drafts_come_back_when_they_pay_again():
    serving = Serving(drafted=1.5, tokens=1)
    serving.steps(300)
    serving.tokens = 3
    assert not all(serving.steps(600))
    assert sum(serving.steps(300)) > 300 - 2 * PLAIN_STEPS


def test_drafts_that_stop_to_pay_are_noticed_soon():
    serving = Serving(drafted=1.5, tokens=3)
    assert all(serving.steps(300)[2 * PLAIN_STEPS :])
    serving.tokens = 1
    assert sum(serving.steps(100)) < 30


def test_one_long_step_decides_nothing():
    serving = Serving(drafted=1.5, tokens=2)
    serving.steps(PLAIN_STEPS + 6)
    serving.now += 100.0
    assert all(serving.steps(300))


def test_steps_that_are_always_long_are_noticed():
    serving = Serving(drafted=100.0, tokens=2)
    assert sum(serving.steps(300)) < 8


def test_batches_of_another_size_are_measured_anew():
    serving = Serving(rows=1, drafted=1.5, tokens=1)
    serving.steps(60)
    assert serving.pace.is_paused
    serving.lengths *= 4
    assert True in serving.steps(PLAIN_STEPS + 4)
    assert not serving.pace.may_draft(1)


def test_steps_beside_prompts_are_not_measured():
    serving = Serving(drafted=1.5, tokens=2)
    for _ in range(40):
        serving.step()
        serving.pace.interrupt()
    assert not any(serving.took)

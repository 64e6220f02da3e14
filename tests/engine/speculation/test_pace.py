"""Rows have as many drafts as give the most tokens per second, and the search for a gain costs little."""

import random
from collections import deque

import pytest

from jaxkv.engine.speculation.pace import PLAIN_STEPS, RATE, Acceptance, Pace

COUNTS = (4, 2, 1)


class Serving:
    """Rows whose steps take given times, and whose drafts are right as often as they are told to be.

    The host reads a step while the `lag` steps after it run.

    Args:
        seconds: returns the time of a step by the drafts of its rows.
        right: number of drafts that are right, or each one's probability as a function of the step.
    """

    def __init__(self, seconds, right, *, rows=3, lag=0):
        self.now, self.lengths = 0.0, [10] * rows
        self.seconds, self.right = seconds, right
        self.pace = Pace(lambda: self.now, COUNTS)
        self.took = []
        self.unread = deque([0] * lag)
        self._draw = random.Random(0)

    def accepted(self, drafts):
        if isinstance(self.right, int):
            return min(drafts, self.right)
        share, accepted = self.right(len(self.took)), 0
        while accepted < drafts and self._draw.random() < share:
            accepted += 1
        return accepted

    def step(self):
        chosen = self.pace.choose(len(self.lengths), COUNTS[0])
        self.unread.append(chosen)
        drafts = self.unread.popleft()
        self.now += self.seconds(drafts)
        for row in range(len(self.lengths)):
            accepted = self.accepted(drafts)
            if drafts:
                self.pace.note(drafts, accepted)
            self.lengths[row] += 1 + accepted
        self.pace.read(range(len(self.lengths)), sum(self.lengths), drafts)
        self.took.append(chosen)

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self.took[-count:]

    @property
    def speedup(self):
        """Tokens of a row, by those that steps without drafts had given it in the same time."""
        tokens = sum(self.lengths) / len(self.lengths) - 10
        return tokens * self.seconds(0) / self.now


def flat(drafted, plain=1.0):
    return lambda drafts: drafted if drafts else plain


def by_token(each):
    return lambda drafts: 1 + each * drafts


def by_tile(drafts):
    """A step of more than three tokens of each row takes half as long again."""
    return 1.0 if not drafts else 1.02 if drafts < 3 else 1.5


def test_drafts_that_pay_go_on_after_steps_without_them_were_measured():
    serving = Serving(flat(1.9), 1)
    taken = serving.steps(400)
    first = next(at for at, drafts in enumerate(taken) if drafts)
    assert PLAIN_STEPS <= first < PLAIN_STEPS + 4
    assert all(taken[first:])
    # From time to time these are measured again.
    assert 4 * PLAIN_STEPS < serving.steps(3000).count(0) < 8 * PLAIN_STEPS
    assert serving.pace.pauses == 0


def test_drafts_that_paid_once_pause_when_steps_without_them_have_become_faster():
    serving = Serving(flat(1.5, plain=2.0), 0)
    serving.steps(100)
    serving.seconds = flat(1.5)
    serving.steps(700)
    assert serving.pace.is_paused


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("drafted", "right"), [(1.02, 0), (1.15, 0), (1.9, 0), (2.1, 1), (3.5, 2), (7.0, 0)]
)
def test_drafts_that_do_not_pay_cost_less_than_a_fiftieth(drafted, right, lag):
    serving = Serving(flat(drafted), right, lag=lag)
    taken = serving.steps(150)
    assert any(taken)
    # At first, the step that spends the credit and those that are read after it come to more.
    lost = serving.now * (1 - serving.speedup)
    assert lost < 2 + 3 * (drafted - right - 1) + 0.01 * len(taken)
    serving.steps(1000)
    assert serving.speedup > 0.98
    serving.steps(8000)
    assert serving.speedup > 1 - 1.5 * RATE
    # The search goes on for ever.
    assert any(serving.steps(2000))
    assert serving.pace.pauses > 2


def test_a_hundred_and_fifty_tokens_lose_two_percent_if_steps_are_as_long_as_overlapping_ones():
    """A step that verifies five drafts takes 1.13 times as long on an H100 if it overlaps with the host."""
    serving = Serving(flat(6.1, plain=5.4), 0, rows=1, lag=1)
    serving.steps(150)
    assert serving.speedup > 0.98


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize(
    "seconds",
    [flat(1.05), by_token(0.1), by_token(0.3), by_tile],
    ids=["flat", "tenths", "thirds", "tiles"],
)
def test_tokens_come_about_as_fast_as_with_the_best_number_of_drafts(seconds, share):
    fixed = [
        sum(share**accepted for accepted in range(drafts + 1)) / seconds(drafts)
        for drafts in (0, *COUNTS)
    ]
    serving = Serving(seconds, lambda _: share, rows=1, lag=1)
    serving.steps(2000)
    assert serving.speedup > 0.95 * max(fixed)
    assert serving.speedup > 0.98


@pytest.mark.parametrize(
    ("seconds", "shares", "most"),
    [
        (flat(1.05), (0.0, 0.95), 3),
        # Drafts that cost nearly nothing are as many as possible, even if few are right.
        (flat(1.05), (0.3, 0.9), 0.9),
        (by_token(0.1), (0.0, 0.95), 3),
        (by_token(0.1), (0.3, 0.9), 1.5),
        (by_token(0.3), (0.0, 0.95), 3),
        (by_tile, (0.3, 0.9), 1.3),
    ],
)
def test_texts_that_change_are_served_faster_than_without_drafts(seconds, shares, most):
    serving = Serving(seconds, lambda step: shares[step // 300 % 2], rows=8, lag=1)
    serving.steps(3000)
    assert serving.speedup > 1.05
    # Long chains where they are right, and few where they are not.
    good = [sum(serving.took[at + 150 : at + 300]) for at in range(300, 3000, 600)]
    bad = [sum(serving.took[at + 150 : at + 300]) for at in range(600, 3000, 600)]
    assert sum(good) / len(good) > most * sum(bad) / len(bad)


def test_more_drafts_are_tried_again_when_fewer_go_well():
    serving = Serving(by_token(0.2), 1)
    taken = serving.steps(500)
    assert set(taken[-300:]) <= {0, 1, 2}
    assert taken[-300:].count(1) > 200
    serving.right = 4
    assert serving.steps(300)[-100:] == [4] * 100


def test_drafts_come_back_when_they_pay_again():
    serving = Serving(flat(1.5), 0)
    serving.steps(300)
    serving.right = 2
    assert not all(serving.steps(600))
    assert serving.steps(300).count(0) < 2 * PLAIN_STEPS


def test_drafts_that_stop_to_pay_are_noticed_soon():
    serving = Serving(flat(1.5), 2)
    assert all(serving.steps(300)[2 * PLAIN_STEPS :])
    serving.right = 0
    assert 100 - serving.steps(100).count(0) < 30


def test_one_long_step_decides_nothing():
    serving = Serving(flat(1.5), 1)
    serving.steps(PLAIN_STEPS + 6)
    serving.now += 100.0
    assert all(serving.steps(300))


def test_steps_that_are_always_long_are_noticed():
    serving = Serving(flat(100.0), 1)
    assert 300 - serving.steps(300).count(0) < 8


def test_batches_of_another_size_are_measured_anew():
    serving = Serving(flat(1.5), 0, rows=1)
    serving.steps(60)
    assert serving.pace.is_paused
    serving.lengths *= 4
    assert any(serving.steps(PLAIN_STEPS + 4))
    assert not serving.pace.choose(1, 4)


def test_many_rows_have_as_few_drafts_as_fit():
    serving = Serving(flat(1.05), 4)
    serving.steps(100)
    assert [serving.pace.choose(3, most) for most in (4, 3, 1, 0)] == [4, 2, 1, 0]


def test_steps_beside_prompts_are_not_measured():
    serving = Serving(flat(1.5), 1)
    for _ in range(40):
        serving.step()
        serving.pace.interrupt()
    assert not any(serving.took)


def test_estimated_tokens_are_those_of_the_shares_that_were_right():
    acceptance, draw = Acceptance(3), random.Random(0)
    for _ in range(2000):
        accepted = 0
        while accepted < 3 and draw.random() < (0.8, 0.5, 0.25)[accepted]:
            accepted += 1
        acceptance.note(3, accepted)
    assert acceptance.tokens(1) == pytest.approx(1.8, abs=0.05)
    assert acceptance.tokens(3) == pytest.approx(1 + 0.8 + 0.4 + 0.1, abs=0.1)
    for _ in range(200):
        acceptance.fade()
    # What was long ago counts little, and a position that is not tried is guessed from the one before.
    for _ in range(50):
        acceptance.note(1, 1)
    assert acceptance.tokens(2) > 2.8

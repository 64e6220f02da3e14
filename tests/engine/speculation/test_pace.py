"""Drafts are made while a token takes less time with them than without."""

import pytest

from jaxkv.engine.speculation.pace import PLAIN_STEPS, WINDOW, Pace


class Serving:
    """Rows whose steps take given times; a step with drafts gives each of them more tokens."""

    def __init__(self, *, rows=3, plain=1.0, drafted=1.5, tokens=2):
        self.now, self.lengths = 0.0, [10] * rows
        self.plain, self.drafted, self.tokens = plain, drafted, tokens
        self.pace = Pace(lambda: self.now)
        self.took = []

    def step(self):
        drafts = self.pace.next_step(range(len(self.lengths)), sum(self.lengths))
        self.now += self.drafted if drafts else self.plain
        self.lengths = [one + (self.tokens if drafts else 1) for one in self.lengths]
        self.took.append(drafts)

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self.took[-count:]


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


@pytest.mark.parametrize(("drafted", "tokens"), [(1.0, 1), (2.1, 2), (3.5, 3)])
def test_drafts_that_do_not_pay_become_rare(drafted, tokens):
    serving = Serving(drafted=drafted, tokens=tokens)
    taken = serving.steps(4000)
    assert 4 < serving.pace.pauses < 12
    assert sum(taken) < (serving.pace.pauses + 1) * (WINDOW + 4)
    # The last pauses are the longest.
    assert sum(taken[3000:]) < 3 * (WINDOW + 4)


def test_drafts_come_back_when_they_pay_again():
    serving = Serving(drafted=1.5, tokens=1)
    serving.steps(300)
    serving.tokens = 3
    assert not all(serving.steps(600))
    assert all(serving.steps(300))


def test_one_long_step_decides_nothing():
    serving = Serving(drafted=1.5, tokens=2)
    serving.steps(PLAIN_STEPS + 6)
    serving.now += 100.0
    assert all(serving.steps(300))


def test_steps_beside_prompts_are_not_measured():
    serving = Serving(drafted=1.5, tokens=2)
    for _ in range(40):
        serving.step()
        serving.pace.interrupt()
    assert not any(serving.took)
